"""``radix-server``: the node's KV cache as a process."""

from __future__ import annotations

import sys
from typing import Any

import rich_click as click

import radixshmem
from radixshmem.cli.options import SHELLS, completion_script, option_groups, setting_options
from radixshmem.config import SETTINGS, ServerConfig

PROGRAM = "radix-server"


def _show_completion(ctx: click.Context, param: click.Parameter, shell: str | None) -> None:
    if shell:
        click.echo(completion_script(ctx.command, PROGRAM, shell))
        ctx.exit()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.rich_config(
    {"option_groups": {"*": option_groups(SETTINGS, rest=["--version", "--completion", "--help"])}}
)
@setting_options(SETTINGS)
@click.option(
    "--completion",
    type=click.Choice(SHELLS),
    is_eager=True,
    expose_value=False,
    callback=_show_completion,
    help="Print shell code that completes this command line, and exit.",
)
@click.version_option(radixshmem.__version__, prog_name=PROGRAM)
def radix_server(**settings: Any) -> None:
    """Keep the KV cache that the inference engines of this node share.

    Start it with a name and a budget; the first engine brings the shape of its KV blocks. Sizes are
    written 64G or 64GiB (64*2^30 bytes), 64GB (64*10^9) or as plain bytes.

    Exit codes: 0 stopped, 1 failed, 2 usage, 3 name in use, 4 not enough memory, 5 cluster, 6 an earlier
    server's regions are in use and do not fit, 130 and 143 interrupted (SIGINT, SIGTERM) before it began.
    """
    from radixshmem.server.serve import serve  # --help and completion need none of it

    try:
        code = serve(ServerConfig(**settings))
    except (ValueError, TypeError) as error:
        raise click.UsageError(str(error)) from None
    sys.exit(code)
