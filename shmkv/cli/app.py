"""The commands and their options; what they do stands in a module each."""
from __future__ import annotations

import sys
from enum import Enum
from typing import Annotated

import typer

import shmkv
from shmkv.cli import console, demo_kill
from shmkv.cli import demo as demo_command
from shmkv.cli import gc as gc_command
from shmkv.cli import info as info_command
from shmkv.cli import ls as ls_command
from shmkv.cli import run as run_command
from shmkv.cli.demo_plan import Plan
from shmkv.config import Settings
from shmkv.errors import LLMException

app = typer.Typer(name="shmkv", help="KV caches in shared memory between processes of one host.", no_args_is_help=True,
                  add_completion=False, pretty_exceptions_enable=False)

NamespaceOption = Annotated[str | None, typer.Option("--namespace", metavar="NAME",
                                                     help="Default: SHMKV_NAMESPACE, else shmkv-<uid>.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class ElementType(str, Enum):
    """Element types that the demo offers."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    INT8 = "int8"


def _namespace(given: str | None) -> str:
    """The namespace meant, checked; LLMParamError for a name that none can have."""
    return Settings.from_options({}, None if given is None else {"SHMKV_NAMESPACE": given}).namespace


@app.callback(invoke_without_command=True)
def shmkv_command(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    """KV caches in shared memory between processes of one host."""
    if version:
        print(f"shmkv {shmkv.__version__}")
        raise typer.Exit


@app.command()
def ls(namespace: NamespaceOption = None, json: JsonOption = False) -> None:
    """List the clusters of a namespace, living and dead, with their caches and links."""
    ls_command.show(_namespace(namespace), json=json)


@app.command()
def gc(namespace: NamespaceOption = None, json: JsonOption = False,
       dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False) -> None:
    """Remove what dead processes left in /dev/shm; whatever a living one owns stays."""
    gc_command.show(_namespace(namespace), dry=dry_run, json=json)


@app.command()
def info(
    json: JsonOption = False,
    layout: Annotated[bool, typer.Option("--layout", help="Print every shared struct and table, as compiled.")] = False,
) -> None:
    """Show versions, the copy kernel and what this host allows."""
    info_command.show(layout=layout, json=json)


@app.command()
def demo(
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model; each has a K and a V tensor.")] = 32,
    heads: Annotated[int, typer.Option(min=1, help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Elements of a head.")] = 128,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a request. Default: 512, or what fits /dev/shm.")] = None,
    dtype: Annotated[ElementType, typer.Option(help="Element type.")] = ElementType.FLOAT16,
    requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 40,
    decoders: Annotated[int, typer.Option(min=1, max=64, help="Decoder processes.")] = 1,
    kill: Annotated[bool, typer.Option("--kill", help="Kill the prompt in the middle of a pull and show what follows.")] = False,
    json: JsonOption = False,
    corrupt: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Hand KV caches from a prompt process to decoder processes, check every byte, and time it."""
    if kill:
        plan = Plan(layers, heads, head_dim, tokens or demo_kill.DEFAULT_TOKENS, dtype.value, 1, 1)
        raise typer.Exit(demo_kill.show(demo_kill.fitted(plan, may_shrink=tokens is None), json=json))
    status = demo_command.show(layers=layers, heads=heads, head_dim=head_dim, tokens=tokens, dtype=dtype.value,
                               requests=requests, decoders=decoders, corrupt=corrupt, json=json)
    raise typer.Exit(status)


@app.command("run", context_settings={"allow_interspersed_args": False})
def run_script(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", show_default=False)] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as for python -m.")] = False,
    stub_npu: Annotated[bool, typer.Option("--stub-npu", help="Stand in for torch.npu.set_device and "
                                           "torchair.llm_datadist.create_npu_tensors as well.")] = False,
) -> None:
    """Run a Python program that was written for llm_datadist, as `python SCRIPT ARGS` would."""
    run_command.become(script, arguments or [], module=module, stub_npu=stub_npu)


def run() -> None:
    """Run the command line; what goes wrong is one red line on stderr and exit status 1."""
    try:
        app()
    except (LLMException, OSError) as error:
        console.error_line(str(error))
        sys.exit(1)
