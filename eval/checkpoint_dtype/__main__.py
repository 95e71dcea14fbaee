"""``python -m eval.checkpoint_dtype``: states and answers restored from native, bf16 and int8 checkpoints.

For each encoding a server of its own, one after the other. Each is asked the same prompts: a prefix whose state is on
the SSD alone and a short new turn behind it. The answer is compared with the one that was computed without any cache.
*State error* is the L2 norm of the difference of the temporal states over the norm of the exact ones; *logprob error* is
the difference of the log probability of each of the next tokens, fed to both alike; *tokens equal* compares what each
would say by itself, greedily, position by position, and *first difference* is the earliest one in all answers.

Exit status 1 if native restores are not exact to 1e-4: then the others mean nothing either.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from eval.aligned import aligned
from eval.arguments import positive, with_examples
from eval.checkpoint_dtype.answers import Answer, cases, computed, fill, restored
from eval.checkpoint_dtype.comparison import HEADER, Line, Pair, cells, line
from eval.checkpoint_dtype.states import Stored, newest, relative_error
from eval.internal_hits import machine
from eval.progress import each
from eval.servers import Server
from sglang_histate.config import CheckpointDtype

EXACT = 1e-4
"""Two servers that compute the same prompt in other pieces differ by less."""
ENVIRON = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


class Measurement:
    """All depths on one server after the other; what the native one computes and stores is what the others meet."""

    def __init__(
        self, work: Path, depths: Sequence[int], count: int, tokens: int, seed: int, model: str | None
    ) -> None:
        self._work = work
        self._tokens = tokens
        self._model = model
        self._cases = [case for depth in depths for case in cases(depth, count, seed)]
        self._exact: list[tuple[Answer, Stored]] = []

    def run(self, encoding: CheckpointDtype) -> list[Line]:
        """Return one line for each depth. The native encoding has to come first.

        Raises:
            ServerFailed, NotRestored, StatesError: there is nothing to compare.
        """
        ssd_dir = self._work / f"{encoding.value}-ssd"
        shutil.rmtree(ssd_dir, ignore_errors=True)
        pairs: dict[int, list[Pair]] = {}
        sizes: dict[int, int] = {}
        with Server(
            self._arguments(encoding, ssd_dir), self._work / f"{encoding.value}.log", ENVIRON
        ) as server:
            server.wait_ready()
            for number, case in enumerate(each(self._cases, encoding.value, "prompt")):
                if encoding is CheckpointDtype.NATIVE:
                    answer = computed(server, case, self._tokens)
                    fill(server, case)
                    self._exact.append((answer, newest(ssd_dir, case.depth)))
                else:
                    fill(server, case)
                exact, exact_state = self._exact[number]
                stored = newest(ssd_dir, case.depth)
                error = relative_error(stored.states, exact_state.states)
                found = Pair(error, restored(server, case, exact.tokens), exact)
                pairs.setdefault(case.depth, []).append(found)
                sizes[case.depth] = stored.size_bytes
        return [line(encoding.value, depth, sizes[depth], found) for depth, found in pairs.items()]

    def _arguments(self, encoding: CheckpointDtype, ssd_dir: Path) -> list[str]:
        deepest = max(case.depth for case in self._cases)
        return [
            *(["--model-path", self._model] if self._model else ["--demo"]),
            *("--histate-ssd-dir", str(ssd_dir), "--histate-ssd-size", "64MiB", "--histate-inflight-size", "16MiB"),
            *("--histate-interval", "fixed:512", "--histate-checkpoint-dtype", encoding.value),
            *("--hicache-ratio", "2", "--max-total-tokens", str(4 * deepest + 4096)),
            *("--chunked-prefill-size", str(2 * deepest)),
        ]  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eval.checkpoint_dtype",
        description=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    with_examples(parser, "python -m eval.checkpoint_dtype --depths 512 4096 --cases 4")
    parser.add_argument(
        "--depths",
        type=_depth,
        nargs="+",
        default=[512, 1024, 2048, 4096],
        metavar="N",
        help="tokens of the prefix, multiples of 512 (%(default)s)",
    )
    parser.add_argument("--cases", type=positive, default=8, help="prompts per depth (%(default)s)")
    parser.add_argument("--tokens", type=positive, default=64, help="of each answer (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (%(default)s)")
    parser.add_argument(
        "--model", help="a model's folder or name (default: the demo model, whose weights are random)"
    )
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=Path("build/checkpoint_dtype"),
        help="logs, SSDs, summary.json (%(default)s)",
    )
    given = parser.parse_args(argv)
    given.work_dir.mkdir(parents=True, exist_ok=True)
    measurement = Measurement(
        given.work_dir, given.depths, given.cases, given.tokens, given.seed, given.model
    )
    lines: list[Line] = []
    for encoding in CheckpointDtype:
        lines += measurement.run(encoding)
        print(f"{encoding.value} measured", file=sys.stderr, flush=True)
    print(aligned([HEADER, *(cells(one) for one in lines)]))
    summary = {"machine": machine.describe(), "lines": [asdict(one) for one in lines]}
    (given.work_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    native = [one for one in lines if one.encoding == CheckpointDtype.NATIVE.value]
    return int(any(one.logprob_error_max > EXACT or one.state_error_max > 0 for one in native))


def _depth(text: str) -> int:
    value = positive(text)
    if value % 512:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of 512, where checkpoints are taken")
    return value


if __name__ == "__main__":
    sys.exit(main())
