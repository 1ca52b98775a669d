"""Entry point of ``radixctl``, ready for a stop signal before anything that takes time is imported."""

from radixshmem.cli import stop_signals


def main() -> None:
    stop_signals.end_at_once()
    from radixshmem.cli.radixctl import PROGRAM, radixctl

    stop_signals.unwind()
    radixctl(prog_name=PROGRAM)


if __name__ == "__main__":
    main()
