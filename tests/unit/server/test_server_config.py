"""The configuration of a node: every form of it, and what is said about what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidelog.metadata.config_table import TABLES, Scope
from tidelog.rpc.protocol_sniffing import WireProtocol
from tidelog.server.config import ConfigError, NodeConfig, load, with_unit
from tidelog.server.config_sources import SourceError, flatten, read_properties, unknown_variable, variable_of
from tidelog.server.listeners import ListenerKind, listener_hints
from tidelog.server.settings_table import ALIASES, SETTINGS, TABLE

OF_KUBERNETES = {
    "TIDELOG_PORT": "tcp://10.0.0.1:9092",
    "TIDELOG_SERVICE_HOST": "10.0.0.1",
    "TIDELOG_SERVICE_PORT": "9092",
    "TIDELOG_SERVICE_PORT_KAFKA": "9092",
    "TIDELOG_PORT_9092_TCP": "tcp://10.0.0.1:9092",
    "TIDELOG_PORT_9092_TCP_PROTO": "tcp",
    "TIDELOG_PORT_9092_TCP_PORT": "9092",
    "TIDELOG_PORT_9092_TCP_ADDR": "10.0.0.1",
    "TIDELOG_HEADLESS_SERVICE_HOST": "10.0.0.2",
    "TIDELOG_HEADLESS_PORT": "tcp://10.0.0.2:9192",
}
GOOD = 'node.id = 1\nlog.dirs = ["data"]\n'


def loaded(tmp_path: Path, text: str, name: str = "node.toml", **environ: str) -> NodeConfig:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return load(str(path), environ)


def problems(tmp_path: Path, text: str, name: str = "node.toml", **environ: str) -> list[str]:
    with pytest.raises(ConfigError) as found:
        loaded(tmp_path, text, name, **environ)
    return list(found.value.problems)


def listeners_of(config: NodeConfig) -> dict[str, tuple[str, ListenerKind]]:
    return {one.name: (str(one.address), one.kind) for one in config.listeners}


class TestForms:
    @pytest.mark.parametrize(
        "text",
        [
            '"node.id" = 1\n"log.dirs" = ["a", "b"]\n"num.partitions" = 3\n',
            'node.id = 1\nlog.dirs = "a,b"\nnum.partitions = 3\n',
            '[node]\nid = 1\n[log]\ndirs = ["a", "b"]\n[num]\npartitions = 3\n',
            'broker.id = 1\n"log.dir" = "a,b"\n"num.partitions" = "3"\n',
        ],
        ids=["quoted", "dotted", "tables", "older names"],
    )
    @pytest.mark.requirement("a:A-20", "a:A-25")
    def test_quoted_dotted_and_in_tables_mean_the_same(self, tmp_path: Path, text: str) -> None:
        config = loaded(tmp_path, text)
        assert config.node == 1
        assert config.log_dirs == (str(tmp_path / "a"), str(tmp_path / "b"))
        assert config.cluster == {"num.partitions": "3"}

    def test_a_key_that_is_given_twice_is_refused(self) -> None:
        with pytest.raises(SourceError, match=r"log\.dirs is there twice"):
            flatten({"log": {"dirs": "a"}, "log.dirs": "b"})

    def test_a_key_and_its_older_name_together_are_refused(self, tmp_path: Path) -> None:
        assert problems(tmp_path, GOOD + "broker.id = 1\n") == ["broker.id: the same as node.id, which is given too"]

    @pytest.mark.requirement("a:A-20")
    def test_the_defaults_are_a_node_that_is_both(self, tmp_path: Path) -> None:
        config = loaded(tmp_path, GOOD)
        assert (config.is_broker, config.is_controller, config.rack) == (True, True, None)
        assert listeners_of(config) == {
            "CONTROLLER": (":9192", ListenerKind.NODE),
            "GRPC": (":9292", ListenerKind.GRPC),
            "KAFKA": (":9092", ListenerKind.KAFKA),
        }
        assert str(config.http) == ":9392"
        assert config.metadata_dir == str(tmp_path / "data")

    def test_units_are_understood(self, tmp_path: Path) -> None:
        config = loaded(tmp_path, GOOD + 'queued.max.request.bytes = "2MiB"\n"log.retention.ms" = "7d"\n')
        assert config.number("queued.max.request.bytes") == 2 << 20
        assert config.cluster == {"log.retention.ms": str(7 * 86_400_000)}
        assert with_unit("5m", "ms") == "300000"
        assert with_unit("5m", "bytes") == "5m"

    def test_every_row_has_a_sentence_and_a_default_that_it_allows(self) -> None:
        for row in SETTINGS:
            assert row.doc.endswith("."), row.name
            assert row.default is not None or row.default_text, row.name
            assert row.name not in TABLES[Scope.CLUSTER], f"{row.name} is a key of the cluster's state"
            if isinstance(row.default, int) and not isinstance(row.default, bool):
                assert row.least is not None
                assert row.most is not None
                assert row.least <= row.default <= row.most, row.name
        assert not set(ALIASES) & set(TABLE)


class TestWrong:
    def test_an_unknown_key_is_named_with_its_value_and_the_nearest_known_one(self, tmp_path: Path) -> None:
        assert problems(tmp_path, GOOD + 'nmu.partitions = 3\n"log.retention.mss" = 5\n') == [
            "nmu.partitions=3: no such key; did you mean num.partitions?",
            "log.retention.mss=5: no such key; did you mean log.retention.ms?",
        ]

    def test_a_topic_key_names_the_key_of_the_cluster(self, tmp_path: Path) -> None:
        (problem,) = problems(tmp_path, GOOD + '"retention.ms" = 5\n')
        assert "its default for all topics is log.retention.ms" in problem

    def test_a_bad_value_is_named_with_what_is_allowed(self, tmp_path: Path) -> None:
        text = 'node.id = -1\nlog.dirs = []\nprocess.roles = "brocker"\nlogging.level = "loud"\n"num.partitions" = 0\n'
        assert problems(tmp_path, text) == [
            "process.roles=brocker (node.toml): a list of broker, controller",
            "node.id=-1 (node.toml): an integer from 0 to 2147483647",
            "log.dirs= (node.toml): a list of paths",
            "logging.level=loud (node.toml): one of debug, info, warning, error",
            "num.partitions='0': an integer from 1 to 10000 (node.toml)",
        ]

    def test_what_is_missing_is_said(self, tmp_path: Path) -> None:
        found = problems(tmp_path, "")
        assert [text.partition(" is missing")[0] for text in found] == ["node.id", "log.dirs"]

    def test_a_broker_alone_must_know_the_controllers(self, tmp_path: Path) -> None:
        (problem,) = problems(tmp_path, GOOD + 'process.roles = "broker"\n')
        assert "controller.quorum.voters" in problem
        config = loaded(
            tmp_path, GOOD + 'process.roles = "broker"\ncontroller.quorum.bootstrap.servers = "host:9192"\n'
        )
        assert config.bootstrap == ("host:9192",)
        assert config.own.name == "INTERNAL"

    def test_what_is_no_toml_is_said_with_its_line(self, tmp_path: Path) -> None:
        (problem,) = problems(tmp_path, "node.id = \n")
        assert problem.startswith("it is not TOML: ")
        assert "line 1" in problem

    @pytest.mark.parametrize("value", ["1@", "x@host:9192", "1@host", "1@host:99999", "1@a:1,1@b:2"])
    @pytest.mark.requirement("a:B-67")
    def test_voters_that_make_no_sense_are_refused(self, tmp_path: Path, value: str) -> None:
        (problem,) = problems(tmp_path, GOOD + f'controller.quorum.voters = "{value}"\n')
        assert problem.startswith("controller.quorum.voters: ")


class TestEnvironment:
    def test_a_variable_overrides_the_file_and_is_named_as_the_source(self, tmp_path: Path) -> None:
        config = loaded(tmp_path, GOOD, TIDELOG_LOG_DIRS="/x,/y", TIDELOG_NUM_PARTITIONS="7")
        assert config.log_dirs == ("/x", "/y")
        assert config.cluster == {"num.partitions": "7"}
        sources = {entry.key: entry.source for entry in config.entries}
        assert sources["log.dirs"] == "TIDELOG_LOG_DIRS"
        assert sources["node.id"] == "node.toml"
        assert sources["broker.rack"] == "default"

    def test_an_unknown_variable_is_a_warning_with_the_nearest_name(self, tmp_path: Path) -> None:
        config = loaded(tmp_path, GOOD, TIDELOG_LOG_DRIS="/x", TIDELOG_QQQQQQQ="1")
        assert config.log_dirs == (str(tmp_path / "data"),)
        assert config.warnings == (
            "the variable TIDELOG_LOG_DRIS is ignored: it is no setting; did you mean TIDELOG_LOG_DIRS?",
            "the variable TIDELOG_QQQQQQQ is ignored: it is no setting",
        )

    def test_variables_that_kubernetes_sets_for_a_service_do_not_stop_a_node(self, tmp_path: Path) -> None:
        config = loaded(tmp_path, GOOD, **OF_KUBERNETES)
        assert len(config.warnings) == len(OF_KUBERNETES)
        for warning in config.warnings:
            assert warning.endswith("is ignored: it is no setting, Kubernetes sets it for a service")

    def test_a_known_variable_with_a_bad_value_stays_an_error(self, tmp_path: Path) -> None:
        (problem,) = problems(tmp_path, GOOD, TIDELOG_NODE_ID="tcp://10.0.0.1:9092")
        assert problem.startswith("node.id=tcp://10.0.0.1:9092 (TIDELOG_NODE_ID): ")

    def test_no_setting_has_a_variable_that_kubernetes_sets(self) -> None:
        for key in (*TABLE, *ALIASES, *TABLES[Scope.CLUSTER]):
            assert "Kubernetes" not in unknown_variable(variable_of(key), ()), key

    def test_variables_of_the_command_are_left_alone(self, tmp_path: Path) -> None:
        loaded(tmp_path, GOOD, TIDELOG_BOOTSTRAP="x", TIDELOG_TRACEBACK="1", TIDELOG_PROFILE="p")

    def test_every_key_has_a_variable_of_its_own(self) -> None:
        keys = (*TABLE, *ALIASES, *TABLES[Scope.CLUSTER])
        assert len({variable_of(key) for key in keys}) == len(keys)

    def test_secrets_come_from_variables_files_and_credentials_and_are_not_shown(self, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("rack-1\n", encoding="utf-8")
        for reference, environ in [
            ("${env:RACK}", {"RACK": "rack-1"}),
            (f"${{file:{tmp_path}/secret}}", {}),
            ("${credential:secret}", {"CREDENTIALS_DIRECTORY": str(tmp_path)}),
        ]:
            config = loaded(tmp_path, GOOD + f'broker.rack = "{reference}"\n', **environ)
            assert config.rack == "rack-1"
            assert {entry.key: entry.value for entry in config.entries}["broker.rack"] == "(hidden)"

    def test_a_reference_that_leads_nowhere_is_a_problem_of_its_key(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"broker\.rack: \$\{env:NOTHING\}: the variable is not set"):
            loaded(tmp_path, GOOD + 'broker.rack = "${env:NOTHING}"\n')


QUICKSTART = """
# of the source notes: node 2 of 3
broker.id=2
log.dirs=/tmp/kafka2-logs
listeners=PLAINTEXT://:9093,CONTROLLER://:9193
process.roles=broker,controller
controller.quorum.voters=1@localhost:9192,\\
    2@localhost:9193,3@localhost:9194
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
num.network.threads=3
zookeeper.connect=localhost:2181
"""


class TestProperties:
    @pytest.mark.requirement("a:O-01", "a:B-66", "a:B-67", "a:B-68", "a:A-22")
    def test_the_file_of_the_quick_start_is_read_as_it_is(self, tmp_path: Path) -> None:
        config = loaded(tmp_path, QUICKSTART, "server.properties")
        assert (config.node, config.is_broker, config.is_controller) == (2, True, True)
        assert config.log_dirs == ("/tmp/kafka2-logs",)
        assert config.voters == ((1, "localhost:9192"), (2, "localhost:9193"), (3, "localhost:9194"))
        assert listeners_of(config) == {
            "CONTROLLER": (":9193", ListenerKind.NODE),
            "GRPC": (":9293", ListenerKind.GRPC),
            "PLAINTEXT": (":9093", ListenerKind.KAFKA),
        }
        assert str(config.http) == ":9393"
        assert config.ignored == ("num.network.threads", "zookeeper.connect")

    def test_lines_are_read_as_java_reads_them(self) -> None:
        text = "a=1\n b : two words \n! no\n#no\nc\\=d e\\\n   f\ng\nh=\\u00e9\\t.\n"
        assert read_properties(text) == {"a": "1", "b": "two words", "c=d": "ef", "g": "", "h": "é\t."}


class TestListeners:
    def test_a_broker_opens_a_kafka_listener_at_its_distance_by_default(self, tmp_path: Path) -> None:
        config = loaded(tmp_path, GOOD + 'listeners = "GRPC://localhost:9393"\n')
        assert listeners_of(config)["KAFKA"] == ("localhost:9193", ListenerKind.KAFKA)
        assert [one.name for one in config.kafka] == ["KAFKA"]
        assert "KAFKA" not in listeners_of(loaded(tmp_path, GOOD + "kafka.enable = false\n"))
        several = loaded(tmp_path, GOOD + 'listeners = "PLAINTEXT://:9092,OUTSIDE://:9095"\n')
        assert [one.name for one in several.kafka] == ["OUTSIDE", "PLAINTEXT"], "those that are listed, and no more"

    def test_a_controller_alone_has_no_kafka_listener(self, tmp_path: Path) -> None:
        config = loaded(tmp_path, GOOD + 'process.roles = "controller"\n')
        assert "KAFKA" not in listeners_of(config)
        listed = loaded(tmp_path, GOOD + 'process.roles = "controller"\nlisteners = "KAFKA://:9092"\n')
        assert listed.kafka == ()

    def test_each_listener_reports_its_advertised_address(self, tmp_path: Path) -> None:
        text = GOOD + 'listeners = "GRPC://0.0.0.0:9292"\nadvertised.listeners = "GRPC://public.example:443"\n'
        config = loaded(tmp_path, text)
        (grpc,) = config.grpc
        assert str(grpc.advertised) == "public.example:443"
        assert str(grpc.address) == "0.0.0.0:9292"
        assert str(config.own.address) == "0.0.0.0:9192"
        assert config.own.advertised.host not in ("", "0.0.0.0")

    def test_an_own_name_for_the_listener_between_brokers(self, tmp_path: Path) -> None:
        text = GOOD + (
            'process.roles = "broker"\ninter.broker.listener.name = "REPLICATION"\n'
            'controller.quorum.voters = "9@c:9192"\nlisteners = "REPLICATION://:7100,GRPC://:7200"\n'
        )
        assert listeners_of(loaded(tmp_path, text))["REPLICATION"] == (":7100", ListenerKind.NODE)

    def test_a_combined_node_may_have_a_listener_between_brokers_beside_that_of_controllers(
        self, tmp_path: Path
    ) -> None:
        listed = 'listeners = "ABC://:7100,CONTROLLER://:7192,GRPC://:7200"\n'
        config = loaded(tmp_path, GOOD + 'inter.broker.listener.name = "abc"\n' + listed)
        assert listeners_of(config)["ABC"] == (":7100", ListenerKind.NODE)
        assert [one.name for one in config.between_nodes] == ["CONTROLLER", "ABC"], "others know it as a controller"
        assert (config.own.name, config.between_brokers.name) == ("CONTROLLER", "ABC")
        unnamed = loaded(tmp_path, GOOD + listed.replace("ABC", "INTERNAL"))
        assert unnamed.between_brokers.name == "INTERNAL"
        one_for_both = loaded(tmp_path, GOOD)
        assert one_for_both.between_brokers is one_for_both.own

    def test_a_file_of_kafka_that_names_the_listener_of_its_clients_between_brokers_is_read(
        self, tmp_path: Path
    ) -> None:
        for listed in ("", 'listeners = "PLAINTEXT://:9092,CONTROLLER://:9192"\n'):
            config = loaded(tmp_path, GOOD + 'inter.broker.listener.name = "PLAINTEXT"\n' + listed)
            assert config.between_brokers.name == "CONTROLLER"

    def test_each_protocol_can_have_several_listeners(self, tmp_path: Path) -> None:
        text = 'listeners = "KAFKA://:9092,OUT://:9093,GRPC://:9292,GRPC_OUT://:9293"\n'
        config = loaded(tmp_path, GOOD + text + 'advertised.listeners = "GRPC_OUT://public:443"\n')
        assert [one.name for one in config.grpc] == ["GRPC", "GRPC_OUT"]
        assert [str(one.advertised) for one in config.grpc][1] == "public:443"
        assert [one.name for one in config.kafka] == ["KAFKA", "OUT"]
        assert listener_hints(config.listeners)[WireProtocol.GRPC] == "gRPC is on port 9292", "the first is named"

    def test_listeners_can_name_their_protocols(self, tmp_path: Path) -> None:
        text = GOOD + 'listeners = "PUBLIC://:880,CONTROLLER://:881"\nlistener.protocols = "PUBLIC:grpc"\n'
        assert listeners_of(loaded(tmp_path, text))["PUBLIC"] == (":880", ListenerKind.GRPC)

    def test_addresses_of_ipv6(self, tmp_path: Path) -> None:
        config = loaded(tmp_path, GOOD + 'listeners = "GRPC://[::1]:9292"\n')
        assert [one.address.to_listen_on for one in config.grpc] == ["[::1]:9292"]
        assert config.own.address.host == "::1"
        assert [one.address.to_listen_on for one in loaded(tmp_path, GOOD).grpc] == ["[::]:9292"]

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ('listeners = "GRPC:9292"', "is not NAME://host:port"),
            ('listeners = "GRPC://:70000"', "port from 1 to 65535"),
            ('listeners = "' + ",".join(f"GRPC{n}://:{7000 + n}" for n in range(17)) + '"', "at most 16"),
            ('listeners = "A://h:9092,B://i:9092,C://h:9092"', "A and C listen on one port"),
            ('listeners = "GRPC://:9292"\ninter.broker.listener.name = "INT"', "INT, and there is no such listener"),
            ('listeners = "GRPC://:9292,CONTROLLER://:9292"', "listen on one port, 9292"),
            ('listeners = "GRPC://:9292,GRPC://:9293"', "has GRPC twice"),
            ('listeners = "SSL://:9092"', "wants SSL; only PLAINTEXT"),
            ('advertised.listeners = "GRPC://:9292"', "a host that others can reach"),
            ('advertised.listeners = "OTHER://h:9292"', "there is no such listener"),
            ('listener.protocols = "GRPC:http"', "one of grpc, kafka, node"),
            ('listeners = "GRPC://:50"', "port -50 is none: list it"),
            ('http.listener = ":9292"', "port 9292 is that of GRPC"),
            ('http.listener = "nonsense"', "is not host:port"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, tmp_path: Path, text: str, why: str) -> None:
        assert why in " ".join(problems(tmp_path, GOOD + text + "\n"))

    def test_http_can_be_left_out(self, tmp_path: Path) -> None:
        assert loaded(tmp_path, GOOD + 'http.listener = "none"\n').http is None


def test_the_page_of_the_settings_is_current() -> None:
    from tidelog.server.config_docs import page

    path = Path(__file__).resolve().parents[3] / "docs" / "node-configuration.md"
    assert path.read_text(encoding="utf-8") == page(), "run: python -m tidelog.server.config_docs"


# Authorization.


@pytest.mark.requirement("a:K-12", "a:K-16")
def test_the_file_names_the_authorizer_and_its_super_users(tmp_path: Path) -> None:
    from tidelog.server.role_config import service_options

    base = 'node.id = 1\nlog.dirs = "logs"\n'
    assert service_options(loaded(tmp_path, base).values).acl is None
    text = base + 'authorizer = "acl"\nsuper.users = "User:root;User:CN=ops,O=x"\n'
    acl = service_options(loaded(tmp_path, text).values).acl
    assert acl is not None
    assert acl.super_users == {"User:root", "User:CN=ops,O=x"}
    assert not acl.allow_everyone_if_no_acl
    open_text = base + 'authorizer = "acl"\nallow.everyone.if.no.acl.found = true\n'
    acl = service_options(loaded(tmp_path, open_text).values).acl
    assert acl is not None
    assert acl.allow_everyone_if_no_acl


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('authorizer = "acl"\n', "nobody could create the first ACL"),
        ('authorizer = "acl"\nsuper.users = "root"\n', "'root' is no principal"),
        ('super.users = "User:a;:b"\n', "':b' is no principal"),
        ('authorizer = "custom"\n', "one of none, acl"),
    ],
)
def test_an_authorizer_that_locks_everybody_out_is_refused_at_the_start(
    tmp_path: Path, text: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        loaded(tmp_path, f'node.id = 1\nlog.dirs = "logs"\n{text}')
