"""Entry point of the `tidelog` command."""


def main() -> int:
    return 0
