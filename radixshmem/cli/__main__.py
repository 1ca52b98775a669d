"""``python -m radixshmem.cli`` is ``radix-server``."""

from radixshmem.cli.server import main

if __name__ == "__main__":
    main()
