"""Waiting for a runtime's events: on the host, with an end.

A runtime says by an event when its pages may be touched. A stream that waits for it on the device can never
be got back when the runtime is killed before the event happens: CUDA reportedly leaves such an event unfired
(pytorch/pytorch#15974), and what shares a hardware queue with that stream stands still, too. So nothing is
enqueued before the event was seen to have happened, which costs a get the watcher's period (50 us to 1 ms).

An event is asked as it was recorded last: one that is recorded again while a call waits for it makes the call
wait for that, too. Runtimes use several in turn (clients/vllm/worker/transfers.py).
"""

import asyncio
from typing import Any

from ...tiers.gpu.device.contract import Device, DeviceError, DeviceFault, Event

EVENT_S = 30.0  # no step of a runtime takes that long


async def has_happened(device: Device, event: Event, given_up: "asyncio.Future[None]") -> bool:
    """Wait until `event` has happened; False when it has not within EVENT_S, or `given_up` came first.

    When it returns or raises, cancelled or not, `event` is not asked any more. Raises DeviceError when the
    device is lost."""
    loop = asyncio.get_running_loop()
    told: asyncio.Future[DeviceError | None] = loop.create_future()

    def tell(error: DeviceError | None) -> None:
        loop.call_soon_threadsafe(told.set_result, error)

    give_up = device.when_done(event, tell)
    either: set[asyncio.Future[Any]] = {told, given_up}
    try:
        await asyncio.wait(either, timeout=EVENT_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_given_up = not told.done()
        if is_given_up:
            give_up()
            await _until_done(told)
    error = told.result()
    if error is not None and not (is_given_up and error.fault is DeviceFault.REFUSED):
        raise error
    return error is None


async def _until_done(future: "asyncio.Future[Any]") -> None:
    """Wait until `future` is done. A cancellation that comes meanwhile is raised after that."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as raised:
            cancelled = raised
    if cancelled is not None:
        raise cancelled
