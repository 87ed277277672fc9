// A switch between hosts that loses, delays, doubles and reorders packets on command.
//
//     network SEED INTERFACE:HOST...
//
// It makes a TUN interface for each host, and hands packets on by the last byte of their IPv4 address, which is HOST.
// Commands, a line each, on stdin; each is answered with a line:
//
//     link FROM TO LOSS DELAY JITTER DOUBLE EARLY     of packets from one host to another one:
//                                                     LOSS, DOUBLE, EARLY in millionths; DELAY, JITTER in microseconds;
//                                                     EARLY ones overtake those that wait
//     clear                                           all links are good again
//     counts                                          packets that were passed, lost, doubled, early
//
// It ends when stdin ends, and its interfaces with it.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#define HOSTS 256
#define PACKET_BYTES 65536
#define WAITING_MAX 65536
#define BURST 64
#define MILLION 1000000u

typedef struct { uint32_t loss, delay_us, jitter_us, twice, early; uint64_t last_due_us; } Link;
typedef struct { uint64_t due_us, order; int fd; uint32_t length; unsigned char *bytes; } Packet;

static Link links[HOSTS][HOSTS];
static int ends[HOSTS];
static Packet waiting[WAITING_MAX];  // a heap, by due time
static uint32_t waiting_count;
static uint64_t random_state, orders;
static unsigned long passed, lost, doubled, overtaken;

static uint64_t now_us(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (uint64_t)at.tv_sec * MILLION + (uint64_t)at.tv_nsec / 1000;
}

static uint32_t draw(uint32_t limit) {  // xorshift64*
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (uint32_t)((random_state * 0x2545F4914F6CDD1Du) >> 32) % limit;
}

static int is_earlier(const Packet *a, const Packet *b) {
    return a->due_us < b->due_us || (a->due_us == b->due_us && a->order < b->order);
}

static void push(Packet packet) {
    if (waiting_count == WAITING_MAX) {  // as in any router
        lost++;
        free(packet.bytes);
        return;
    }
    uint32_t at = waiting_count++;
    for (; at > 0 && is_earlier(&packet, &waiting[(at - 1) / 2]); at = (at - 1) / 2) waiting[at] = waiting[(at - 1) / 2];
    waiting[at] = packet;
}

static Packet pop(void) {
    Packet first = waiting[0], moved = waiting[--waiting_count];
    uint32_t at = 0;
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= waiting_count) break;
        if (child + 1 < waiting_count && is_earlier(&waiting[child + 1], &waiting[child])) child++;
        if (!is_earlier(&waiting[child], &moved)) break;
        waiting[at] = waiting[child];
        at = child;
    }
    waiting[at] = moved;
    return first;
}

// A full or closed interface loses the packet.
static void deliver(int fd, const unsigned char *bytes, size_t length) {
    if (write(fd, bytes, length) == (ssize_t)length) passed++; else lost++;
}

static void carry(const unsigned char *bytes, size_t length) {
    if (length < 20 || bytes[0] >> 4 != 4) return;
    uint32_t from = bytes[15], to = bytes[19];
    Link *link = &links[from][to];
    if (ends[to] < 0) return;
    if (link->loss && draw(MILLION) < link->loss) { lost++; return; }
    int copies = link->twice && draw(MILLION) < link->twice ? 2 : 1;
    doubled += copies == 2;
    for (; copies > 0; copies--) {
        if (!link->delay_us && !link->jitter_us && link->last_due_us <= now_us()) {
            deliver(ends[to], bytes, length);
            continue;
        }
        uint64_t due_us = now_us();
        if (link->early && draw(MILLION) < link->early) {
            overtaken++;
        } else {
            due_us += link->delay_us + (link->jitter_us ? draw(link->jitter_us) : 0);
            if (due_us < link->last_due_us) due_us = link->last_due_us;
            link->last_due_us = due_us;
        }
        Packet packet = {due_us, orders++, ends[to], (uint32_t)length, malloc(length)};
        if (packet.bytes == NULL) abort();
        memcpy(packet.bytes, bytes, length);
        push(packet);
    }
}

static int open_tun(const char *name) {
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    struct ifreq request = {0};
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
    if (fd < 0 || ioctl(fd, TUNSETIFF, &request) != 0) {
        perror(name);
        exit(1);
    }
    return fd;
}

static void obey(const char *line) {
    uint32_t from, to;
    Link set = {0};
    if (!strcmp(line, "clear")) {
        // Packets that wait stay in order: a link that had a delay keeps the time of its last one.
        for (int a = 0; a < HOSTS; a++)
            for (int b = 0; b < HOSTS; b++) links[a][b] = (Link){.last_due_us = links[a][b].last_due_us};
    } else if (!strcmp(line, "counts")) {
        printf("{\"passed\": %lu, \"lost\": %lu, \"doubled\": %lu, \"early\": %lu}\n", passed, lost, doubled, overtaken);
        fflush(stdout);
        return;
    } else if (sscanf(line, "link %u %u %u %u %u %u %u", &from, &to, &set.loss, &set.delay_us, &set.jitter_us,
                      &set.twice, &set.early) == 7 && from < HOSTS && to < HOSTS) {
        set.last_due_us = links[from][to].last_due_us;
        links[from][to] = set;
    } else {
        printf("unknown command: %s\n", line);
        fflush(stdout);
        return;
    }
    printf("done %s\n", line);
    fflush(stdout);
}

// Whole lines only are obeyed. Returns 0 when stdin has ended.
static int read_commands(void) {
    static char text[4096];
    static size_t filled;
    ssize_t got = read(0, text + filled, sizeof text - 1 - filled);
    if (got <= 0) return 0;
    filled += (size_t)got;
    text[filled] = 0;
    for (char *end; (end = strchr(text, '\n')) != NULL;) {
        *end = 0;
        obey(text);
        filled -= (size_t)(end + 1 - text);
        memmove(text, end + 1, filled + 1);
    }
    return 1;
}

int main(int count, char **arguments) {
    struct pollfd polled[HOSTS + 1] = {{.fd = 0, .events = POLLIN}};
    nfds_t polled_count = 1;
    static unsigned char bytes[PACKET_BYTES];
    if (count < 3) {
        fprintf(stderr, "usage: network SEED INTERFACE:HOST...\n");
        return 2;
    }
    random_state = strtoull(arguments[1], NULL, 10) | 1;
    for (int host = 0; host < HOSTS; host++) ends[host] = -1;
    for (int index = 2; index < count && polled_count <= HOSTS; index++) {
        char *colon = strchr(arguments[index], ':');
        int host = colon == NULL ? -1 : atoi(colon + 1);
        if (host < 1 || host >= HOSTS) return 2;
        *colon = 0;
        ends[host] = open_tun(arguments[index]);
        polled[polled_count++] = (struct pollfd){.fd = ends[host], .events = POLLIN};
    }
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        struct timespec wait = {3600, 0};
        uint64_t now = now_us();
        if (waiting_count > 0) {
            uint64_t us = waiting[0].due_us > now ? waiting[0].due_us - now : 0;
            wait = (struct timespec){(time_t)(us / MILLION), (long)(us % MILLION) * 1000};
        }
        if (ppoll(polled, polled_count, &wait, NULL) < 0 && errno != EINTR) return 1;
        if (polled[0].revents && !read_commands()) return 0;
        for (nfds_t index = 1; index < polled_count; index++) {
            if (!(polled[index].revents & POLLIN)) continue;
            for (int burst = 0; burst < BURST; burst++) {
                ssize_t length = read(polled[index].fd, bytes, sizeof bytes);
                if (length <= 0) break;
                carry(bytes, (size_t)length);
            }
        }
        for (now = now_us(); waiting_count > 0 && waiting[0].due_us <= now;) {
            Packet packet = pop();
            deliver(packet.fd, packet.bytes, packet.length);
            free(packet.bytes);
        }
    }
}
