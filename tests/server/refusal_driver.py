"""Runs many command lines through the server's start-up checks, importing SGLang only once.

Reads a JSON list of ``{"argv": [...], "environ": {...}}`` from stdin, forks once per entry and writes a JSON list of
``{"code": ..., "output": ...}``. Code 77 stands for a server that would have started.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback

from sglang_histate.adapter import serve

WOULD_SERVE = 77


def run(argv: list[str], environ: dict[str, str]) -> dict[str, object]:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.environ.update(environ)
            code: object = 1
            try:
                code = serve.main(argv)
            except SystemExit as end:
                code = end.code
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return {"code": os.waitstatus_to_exitcode(status), "output": output.read().decode(errors="replace")}


if __name__ == "__main__":
    serve._run = lambda server_args: WOULD_SERVE
    answers = [run(case["argv"], case["environ"]) for case in json.load(sys.stdin)]
    print("\nANSWERS " + json.dumps(answers))
