"""KVPool's command line: `kvpool`, which kubectl also runs as `kubectl kvpool`.

To add a command, write a module under `kvpool_cli/commands/` with these names and add it to `registry.COMMANDS`:

- `NAME: str`, the command's name; `HELP: str`, one line for the list of commands.
- `add_arguments(parser: argparse.ArgumentParser) -> None`, its arguments. `-o`, `--color` and, if the module sets
  `CLUSTER = True`, `--context`, `--kubeconfig` and `-n` are there already. `FORMATS` replaces the choices of `-o`.
- `run(args: argparse.Namespace) -> int`, which returns `errors.OK` or `errors.FINDINGS`.

`run` prints through `output.emit(args, data, text)`: `data` is made of dicts, lists, strings, numbers, booleans and
None; `text` draws the same facts for a terminal with a `Style`. A CliError ends the process with its sentence and exit
code; `kubectl.Kubectl.of(args)` reads the cluster and raises UnreachableError. Nothing else prints.

A module imports heavy packages inside `run`: every module is imported at each start, because the parser needs it.
"""
