"""The one way a step is measured.

Several times, since they answer different questions:

- `device_ms`: what the GPU is busy for. The stream is first blocked by a sleeping kernel while the host enqueues the
  steps, so that no gap between launches counts; the event pairs around each step then hold device time only.
- `wall_ms`: the host's clock over a loop of steps issued back to back, per step: the larger of host and device time.
- `wall_sync_ms`: one step between two synchronisations, where host and device time add up.
- `event_ms`: events around steps issued back to back without synchronising: the device's view of the same loop.
- `sustained_ms`: events again, at the end of steps that went on for two seconds (large sets only).

A GPU that has been busy for most of a second may lower its clock to keep its power limit. A training step contains one
optimizer step, a benchmark thousands in a row. So loops of both kinds take turns and rest in between for as long as
they ran, which keeps the device in one state for all figures; `sustained_ms` shows the other state.

`wall_new_grads_ms` is `wall_sync_ms` with gradients at other addresses in every step, as after `zero_grad()`.
All are medians. Weights and gradients are random: zeros take less power and a processor can run faster on them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from statistics import median
from typing import Any

import torch

from benchmarks.optimizers import Entry, step_function
from benchmarks.sets import Shape

ONLY_CUDA = ("device_ms", "event_ms", "sustained_ms", "device_queue_full")  # None on a CPU
WARM_UP_STEPS = {"cuda": 5, "cpu": 2}  # a captured step needs 4
COPY_BYTES = 4 << 30
MAX_SLEEP_MS = 3000.0
MAX_REST_S = 0.3
SUSTAINED_S = 2.0
SUSTAINED_NUMEL = 1 << 28  # smaller sets leave the device idle between steps
BUDGET_S = {"cuda": 1.0, "cpu": 5.0}  # for one loop; times on a CPU scatter more, and the median needs more of them


def synchronise(device: str) -> None:
    """Waits for the device; nothing to wait for on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """A start and an end event that record time."""
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def copy_bandwidth(repeats: int = 10) -> float:
    """Bytes per second, read plus written, of a device-to-device copy of 4 GiB of random bytes."""
    source = torch.empty(COPY_BYTES, dtype=torch.int8, device="cuda").random_(-128, 127)
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    pairs = []
    for _ in range(repeats):
        start, end = event_pair()
        start.record()
        target.copy_(source)
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    seconds = median(start.elapsed_time(end) for start, end in pairs) * 1e-3
    del source, target
    torch.cuda.empty_cache()
    return 2 * COPY_BYTES / seconds


def wall_times(
    step: Callable[[], Any], iters: int, device: str, before: Callable[[], Any] | None = None
) -> list[float]:
    """Milliseconds of `iters` synchronised steps; `before` runs ahead of each, outside of the time."""
    times = []
    for _ in range(iters):
        if before:
            before()
        synchronise(device)
        start = time.perf_counter()
        step()
        synchronise(device)
        times.append((time.perf_counter() - start) * 1e3)
    return times


def loop_time(step: Callable[[], Any], iters: int) -> float:
    """Milliseconds a step of one loop, synchronised at its ends only."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(iters):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / iters


def event_times(step: Callable[[], Any], iters: int) -> list[float]:
    """Milliseconds between events around `iters` steps issued back to back."""
    pairs = [event_pair() for _ in range(iters)]
    for start, end in pairs:
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def alternating_times(step: Callable[[], Any], iters: int, rounds: int = 3) -> tuple[list[float], list[float]]:
    """`loop_time` and `event_times` of loops that take turns, each after a rest as long as the loop before."""
    loops: list[float] = []
    events: list[float] = []
    for _ in range(rounds):
        loops.append(loop_time(step, iters))
        time.sleep(min(MAX_REST_S, loops[-1] * iters * 1e-3))
        events += event_times(step, iters)
        time.sleep(min(MAX_REST_S, loops[-1] * iters * 1e-3))
    return loops, events


def sustained_time(step: Callable[[], Any], step_ms: float) -> float:
    """Milliseconds a step at the end of SUSTAINED_S seconds without a pause."""
    times = event_times(step, max(4, int(SUSTAINED_S * 1e3 / step_ms)))
    return median(times[-len(times) // 4 :])


def cycles_per_ms() -> float:
    """The rate of the clock that `torch.cuda._sleep` counts."""
    cycles = 20_000_000
    torch.cuda._sleep(cycles)  # the first launch loads the kernel
    start, end = event_pair()
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    return cycles / start.elapsed_time(end)


def device_times(step: Callable[[], Any], iters: int, wall_ms: float) -> tuple[list[float], bool]:
    """Milliseconds of device time of `iters` steps, and whether the queue was full throughout.

    A stream holds about a thousand launches. A step with more of them blocks the host until the sleep ends, and gaps
    between launches count again: the times are then upper bounds and the flag is False.
    """
    rate = cycles_per_ms()
    steps = 5 if 5 * wall_ms < MAX_SLEEP_MS / 2 else 1
    times: list[float] = []
    always_full = True
    while len(times) < iters:
        pairs = [event_pair() for _ in range(steps)]
        awake = torch.cuda.Event()
        torch.cuda._sleep(int(rate * min(MAX_SLEEP_MS, 2 + 1.5 * steps * wall_ms)))
        awake.record()
        for start, end in pairs:
            start.record()
            step()
            end.record()
        full = not awake.query()  # still asleep after the last launch: the device waited, not the host
        torch.cuda.synchronize()
        if not full and steps > 1:
            steps = 1
            continue
        always_full &= full
        times += [start.elapsed_time(end) for start, end in pairs]
    return times, always_full


def temporary_bytes_cpu(step: Callable[[], Any]) -> int:
    """The most bytes that one step holds on top of what was there before, from torch's own allocations."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the storages behind the optimizer's state."""
    storages = {}
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def affordable(iters: int, step_ms: float, budget_s: float) -> int:
    """Fewer repetitions for a slow step: at least 3, at most `iters`, about `budget_s` in one loop."""
    return max(3, min(iters, int(budget_s * 1e3 / max(step_ms, 1e-3))))


def measure(entry: Entry, shapes: Sequence[Shape], device: str, iters: int) -> dict[str, Any]:
    """Builds parameters, gradients and optimizer, and measures its step.

    Returns: the fields of a row, without the names and the share of the copy bandwidth.
    """
    torch.manual_seed(0)
    params = [torch.nn.Parameter((torch.randn(s, device=device) * 0.02).to(entry.dtype)) for s in shapes]

    def random_grads() -> list[torch.Tensor]:
        return [(torch.randn(s, device=device) * 1e-3).to(entry.dtype) for s in shapes]

    def set_grads(grads: list[torch.Tensor]) -> None:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad

    grads = random_grads()
    set_grads(grads)
    numel = sum(p.numel() for p in params)
    row: dict[str, Any] = {"numel": numel, **dict.fromkeys(ONLY_CUDA)}
    synchronise(device)
    allocated = torch.cuda.memory_allocated() if device == "cuda" else 0
    optimizer = entry.build(params)
    step = step_function(entry, optimizer)
    for _ in range(WARM_UP_STEPS[device]):
        step()
    synchronise(device)
    first = wall_times(step, 1, device)[0]
    iters = affordable(iters, first, BUDGET_S[device])

    if device == "cuda":
        row["bytes_per_param"] = (torch.cuda.memory_allocated() - allocated) / numel
        steady = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        row["wall_sync_ms"] = median(wall_times(step, iters, device))
        loops, events = alternating_times(step, iters)
        row["wall_ms"], row["event_ms"] = median(loops), median(events)
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
        row["temporary_bytes"] = row["peak_bytes"] - steady
        times, row["device_queue_full"] = device_times(step, iters, row["wall_sync_ms"])
        row["device_ms"] = median(times)
        if numel >= SUSTAINED_NUMEL:
            row["sustained_ms"] = sustained_time(step, row["event_ms"])
    else:
        row["bytes_per_param"] = state_bytes(optimizer) / numel
        row["wall_ms"] = row["wall_sync_ms"] = median(wall_times(step, iters, device))
        row["temporary_bytes"] = temporary_bytes_cpu(step)
        weights_and_grads = 2 * sum(p.nbytes for p in params)
        row["peak_bytes"] = weights_and_grads + state_bytes(optimizer) + row["temporary_bytes"]
    row["iters"] = iters

    row["wall_new_grads_ms"] = None
    if entry.mode != "graph":  # a captured step is bound to its addresses
        turns = cycle([random_grads(), grads])
        row["wall_new_grads_ms"] = median(wall_times(step, iters, device, lambda: set_grads(next(turns))))
    return row


def free(device: str) -> None:
    """Hands the memory of the last set back, so that the next one starts from nothing."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
