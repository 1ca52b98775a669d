"""Entry point of ``radix-server``, ready for a stop signal before anything that takes time is imported."""

from radixshmem.cli import stop_signals


def main() -> None:
    stop_signals.end_at_once()  # until serve() has handlers of its own, and something to give back
    from radixshmem.cli.radix_server import PROGRAM, radix_server

    radix_server(prog_name=PROGRAM)


if __name__ == "__main__":
    main()
