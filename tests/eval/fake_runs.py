"""Runs made by hand, for the tests of metrics and report."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from eval.metrics import Run
from eval.records import Record, RecordWriter, RunFacts


def request(
    session: str = "s1",
    turn: int = 0,
    *,
    prompt: int = 1000,
    ttft: float = 1.0,
    device: int = 0,
    host: int = 0,
    ssd: int = 0,
    reusable: int = 0,
    kv: int | None = 0,
    start: float = 0.0,
    output: int = 11,
    decode: float = 1.0,
    agent: str = "",
    rewrite: bool = False,
    error: str = "",
) -> Record:
    """One request that was sent as soon as it could be."""
    restored = {"device": device, "host": host, "ssd": ssd}
    tier = next((name for name, tokens in reversed(restored.items()) if tokens), "")
    first = start + ttft
    return Record(
        session, agent, turn, start, start, first, first + decode, prompt, output, restored, tier, kv, reusable,
        rewrite, error,
    )  # fmt: skip


def run(
    system: str,
    *records: Record,
    workload: str = "tiny",
    source: str = "simulation",
    path: str = "",
    commit: str = "abc1234",
    command: str = "python -m eval.simulate --out build/tiny",
    **facts: Any,
) -> Run:
    found = RunFacts(system, source, workload, commit, command, facts)
    return Run(Path(path or f"{system}.jsonl"), found, tuple(records))


def write(folder: Path, *runs: Run) -> list[Path]:
    """Write runs as files; return their paths."""
    paths = []
    for one in runs:
        paths.append(folder / one.path)
        with RecordWriter(paths[-1], one.facts) as writer:
            for record in one.records:
                writer.add(record)
    return paths


def tiny() -> list[Run]:
    """Two systems, two sessions of two turns: small enough for paper and pencil."""
    histate = run(
        "histate",
        request("s1", 0, ttft=1.0),
        request("s1", 1, prompt=2000, device=1000, reusable=1000, kv=1000, ttft=0.2, start=10.0),
        request("s2", 0, ttft=2.0),
        request("s2", 1, prompt=2000, ssd=500, reusable=1000, kv=900, ttft=0.6, start=20.0, decode=3.0),
        ssd_written_bytes=5000,
        intervals={"1024": 3, "none": 1},
    )
    disk = run(
        "vllm-disk",
        request("s1", 0, ttft=1.0),
        request("s1", 1, prompt=2000, host=1000, reusable=1000, kv=1000, ttft=0.2, start=10.0),
        request("s2", 0, ttft=2.0),
        request("s2", 1, prompt=2000, reusable=1000, kv=1000, ttft=1.2, start=20.0),
    )
    return [histate, disk]


def random_run(
    system: str, seed: int, sessions: int = 8, turns: int = 6, share: float = 0.9, **more: Any
) -> Run:
    """A run with every kind of request; prompts depend on `seed` only, hits on the system too."""
    prompts, draw = random.Random(f"prompts {seed}"), random.Random(f"{system} {seed}")
    records = []
    for number in range(sessions):
        clock, before = prompts.uniform(0, 5), 0
        for turn in range(turns):
            prompt = before + prompts.randrange(64, 4000)
            rewrite = turn > 0 and prompts.random() < 0.2
            reusable = prompts.randrange(before + 1) if rewrite else before
            kv = reusable if draw.random() < share else reusable // 2
            hit = kv if draw.random() < share else draw.randrange(kv + 1)
            device = draw.randrange(hit + 1)
            ssd = draw.randrange(hit - device + 1)
            ttft = 0.03 + (prompt - hit) / 30000
            records.append(
                request(
                    f"s{number}", turn, prompt=prompt, ttft=ttft, device=device, host=hit - device - ssd, ssd=ssd,
                    reusable=reusable, kv=kv, start=clock, output=prompts.randrange(1, 60), rewrite=rewrite,
                )
            )  # fmt: skip
            clock += ttft + prompts.uniform(1, 30)
            before = prompt
    return run(system, *records, **more)
