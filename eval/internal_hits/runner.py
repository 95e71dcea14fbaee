"""Starts one system after the other and sends it the requests of the cases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from eval.internal_hits.cases import LONG, Ask, Case, Draw, Scale
from eval.internal_hits.records import Record, record_of
from eval.internal_hits.systems import Running, Setup, command_line, disk_dir
from eval.progress import each
from eval.servers import Server

Say = Callable[[str], None]
START_TIMEOUT_S = 900.0


@contextmanager
def started(name: str, setup: Setup, say: Say) -> Iterator[Running]:
    """Start a system, send what a first request would otherwise pay for, and empty it; stop it at the end."""
    arguments, environ = command_line(name, setup)
    disk_dir(name, setup).parent.mkdir(parents=True, exist_ok=True)
    chunk = "default" if setup.chunk is None else setup.chunk
    begin = time.monotonic()
    with Server(arguments, setup.work_dir / f"{name}-{chunk}.log", environ) as server:
        server.wait_ready(START_TIMEOUT_S)
        running = Running(name, setup, server)
        running.measure_holdings()
        warm_up = Draw(f"warm-up/{name}")
        for length in (LONG, 200):
            running.ask(warm_up.tokens(length), 4)
        running.flush()
        held = f": {running.holdings.text()}" if running.holdings else ""
        say(f"{name} (chunk size {chunk}) is up after {time.monotonic() - begin:.0f} s{held}")
        yield running


def known_bytes(setup: Setup, running: Running) -> Setup:
    """Return `setup` with HiState's real bytes in it, by which the systems that start later are sized."""
    if running.name != "histate" or running.holdings is None:
        return setup
    return replace(setup, reference=running.holdings, units=running.units)


def run_case(systems: Sequence[Running], case: Case, scale: Scale, seed: int, say: Say) -> list[Record]:
    """Send a case, all repeats, and return a record of every request.

    Several systems are asked in turn, one request after the other and in alternating order, so that a slow spell of
    the machine meets all of them.
    """
    records: list[Record] = []
    for repeat, text in each(case.seeds(seed, scale), f"case {case.key}", "round"):
        for running in systems:
            running.flush()
        dialogues = {running.name: case.dialogue(Draw(text), scale) for running in systems}
        requests: dict[str, Ask] = {name: next(dialogue) for name, dialogue in dialogues.items()}
        step = 0
        while requests:
            for running in systems if step % 2 == 0 else systems[::-1]:
                name = running.name
                request = requests[name]
                if request.flush_before:
                    running.flush()
                answer, cpu_s = running.ask_counting(request.prompt, request.output_tokens)
                records.append(
                    record_of(
                        answer,
                        case=case.key,
                        row=request.row,
                        system=name,
                        repeat=repeat,
                        step=step,
                        reusable=None if request.match is None else request.reusable,
                        cpu_s=cpu_s,
                    )
                )
                running.settle()
                try:
                    requests[name] = dialogues[name].send(answer.output_ids)
                except StopIteration:
                    del requests[name]
            step += 1
    for last in [record for record in records if record.place == records[-1].place]:
        say(
            f"  {last.system}, case {case.key}: last request {last.cached.total} of {last.prompt_tokens} cached, "
            f"first token after {last.ttft_s:.2f} s"
        )
    return records
