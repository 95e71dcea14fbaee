"""What `--help` and docs/flags.md say of each of HiState's flags. Units and choices; the reasons for defaults are in `config`."""

from __future__ import annotations

FLAG_HELP: dict[str, str] = {
    "disable_histate": "Serve with SGLang's own caching only: no HiState cache, no SSD tier.",
    "demo": "Serve the generated demo model (a small Qwen3.5-style hybrid); needs no download and no GPU.",
    "histate_ssd_dir": (
        "Directory of the SSD checkpoint tier. It is created (0700) if its parent exists. Required unless "
        "--disable-histate is given."
    ),
    "histate_ssd_size": (
        "Hard size of the SSD tier per rank, such as 512MiB or 2TiB (KiB, MiB, GiB, TiB). The space is taken at start."
    ),
    "histate_allow_any_filesystem": (
        "Serve with the SSD tier on tmpfs, overlay or a network file system too. They gain nothing, or lock and cache by "
        "other rules: for trials only."
    ),
    "no_histate_keep_on_restart": (
        "Begin with an empty SSD tier. What an earlier server left there is not used, now or later."
    ),
    "histate_shutdown_time": (
        "Longest time in seconds that a graceful exit spends on writing what the host has and the SSD has not, so that a "
        "restart finds it: the most valuable sessions first. SGLang kills a server that takes longer than 15."
    ),
    "histate_interval": (
        "Where to capture checkpoints inside a prompt: 'adaptive' weighs recomputation against storage for each "
        "segment, 'scarce' does so at the price of what the SSD gives up for it, 'learned' captures where earlier requests "
        "were seen to part, 'fixed:N' captures every N tokens, 'align' captures where a scheduler step ends on a block boundary, "
        "'none' captures only prompt and output ends."
    ),
    "histate_intervals": (
        "The intervals that 'adaptive' and 'scarce' choose from: comma-separated multiples of 64, optionally with 'none'."
    ),
    "histate_host_size": (
        "Host memory of the whole server, over all ranks, for KV pages and checkpoints together, in-flight checkpoints "
        "included. 'auto' takes what --hicache-size or --hicache-ratio would have taken for the host pools, plus "
        "--histate-inflight-size per rank."
    ),
    "histate_static_split": (
        "Keep a fixed share of device memory for KV and one for states, instead of one pool of bytes that both share."
    ),
    "histate_inflight_size": (
        "Pinned host memory per rank for checkpoints on their way to or from the SSD. When it is full, interior "
        "captures are dropped (and counted), never waited for."
    ),
    "histate_history": (
        "Where checkpoints inside prompts go: 'ssd' always to the SSD, 'cheapest' to the host where their bytes cost less than "
        "there, or where the SSD does not take them (write limits, a disk that fails) and they save more than the host's room "
        "costs. What only the host has is lost when it is evicted there."
    ),
    "histate_step_tail": (
        "Keep so many of the --chunked-prefill-size tokens of a step for prompts that end with them, so that the few tokens below "
        "a checkpoint do not cost a second step: 2048 of 10240 leave 8192 for any prompt. A multiple of 64, 0 for none."
    ),
    "histate_checkpoint_dtype": (
        "How the SSD and checkpoints on their way to it hold recurrent states: 'native' bit for bit, 'bf16' in half the "
        "bytes (relative error at most 2^-8), 'int8' in little more than a quarter (error at most 1/254 of the largest "
        "number of the same head and key channel). States on device and host stay as the model has them."
    ),
    "histate_read_threads": "Threads per rank that read checkpoints from the SSD.",
    "histate_ssd_write_rate": (
        "Most bytes per second that a rank writes to the SSD, such as 200MiB, or 'unlimited'; 0 writes nothing and only "
        "reads what is there. Five seconds' worth may come at once. When bytes are short, the records go first that save "
        "the most recomputation per byte."
    ),
    "histate_ssd_daily_writes": (
        "Most bytes that a rank writes to the SSD in one UTC day, such as 4TiB, or 'unlimited'. It is counted over restarts."
    ),
    "histate_write_queue_age": (
        "Longest time in seconds that a record may be expected to wait for the writes before it; beyond, the record that is "
        "worth least is not written."
    ),
    "histate_min_gain": (
        "Smallest number of prefill tokens that a checkpoint read must save; a smaller gain is recomputed instead."
    ),
    "histate_verify_rate": (
        "Share of the prefixes restored through the SSD, 0 to 1, that is computed again while the server is idle and "
        "compared. A difference ends all use of the SSD tier until its directory is purged or another one is given."
    ),
    "histate_eviction": (
        "What goes first when a tier is full: 'score' ranks all units by last access and by what losing them costs, "
        "'loss' by what losing them is expected to cost if they are used again less likely the longer they are idle, "
        "'lru' by last access alone, 'lru-refresh' by last access where a hit counts for every earlier checkpoint of its "
        "prefix."
    ),
    "histate_tau": (
        "Weight of the cost in the eviction score, in requests: a unit whose loss costs as many tokens of recomputation as "
        "its bytes could hold tokens of KV ranks like one used so many requests later. With 'loss': the requests of idleness "
        "after which a unit is e times less likely to be used again."
    ),
    "no_histate_metrics": (
        "Do not serve /metrics unless --enable-metrics is given, and tell Prometheus nothing of HiState. GET /histate/status "
        "has the same figures either way."
    ),
    "histate_explain_requests": (
        "How many of the latest requests GET /histate/explain and the status page know about, 0 for none. Their token ids, "
        "at most 32 MB, are kept to find where a prompt departs from earlier ones."
    ),
    "histate_policy_log": (
        "Write everything the policy is told and what it answers to this file (ranks above the first add their name), for "
        "python -m eval.journal: it grows by some kilobytes per request."
    ),
}
"""Help text by field name of the server arguments."""
