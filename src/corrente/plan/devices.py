"""Devices that a plan can be made for, by the numbers of their data sheets: dense bf16 FLOP/s, bytes per second, bytes."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from corrente.errors import ConfigError

TERA, GIGA, GIB = 1e12, 1e9, float(1 << 30)


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of device.

    ``flops``: dense bf16 FLOP/s (float32 on a CPU). ``memory_bytes_s``: bandwidth of its memory. ``memory_bytes``: its size.
    ``node``: devices of a host. ``link_bytes_s``: one way between two devices of a host; ``network_bytes_s``: per device between
    hosts. ``host_bytes_s``: one way between a device and the memory of its host. ``weight_bytes``: of a parameter, as served.
    ``start_s``: the least time of a decode step, whatever it computes.
    """

    name: str
    flops: float
    memory_bytes_s: float
    memory_bytes: float
    node: int = 8
    link_bytes_s: float = 450 * GIGA
    network_bytes_s: float = 50 * GIGA
    host_bytes_s: float = 50 * GIGA
    weight_bytes: float = 2.0
    start_s: float = 0.004


def _gpu(name: str, tflops: float, tb_s: float, gb: float, **more: float | int) -> Device:
    return Device(name=name, flops=tflops * TERA, memory_bytes_s=tb_s * TERA, memory_bytes=gb * GIGA, **more)  # pyright: ignore


DEVICES: Mapping[str, Device] = {
    device.name.lower(): device
    for device in (
        _gpu("A100", 312, 2.0, 80, link_bytes_s=300 * GIGA, network_bytes_s=25 * GIGA, host_bytes_s=25 * GIGA),
        _gpu("H100", 989, 3.35, 80),
        _gpu("H200", 989, 4.8, 141),
        _gpu("H800", 989, 3.35, 80, link_bytes_s=200 * GIGA),
        _gpu("H20", 148, 4.0, 96),
        _gpu("B200", 2250, 8.0, 180, link_bytes_s=900 * GIGA),
        _gpu(
            "GB200", 2500, 8.0, 186, node=4, link_bytes_s=900 * GIGA, network_bytes_s=50 * GIGA, host_bytes_s=200 * GIGA
        ),
        _gpu("MI300X", 1307, 5.3, 192, link_bytes_s=448 * GIGA),
        _gpu("L40S", 362, 0.864, 48, link_bytes_s=25 * GIGA, network_bytes_s=12.5 * GIGA, host_bytes_s=25 * GIGA),
        _gpu("RTX4090", 165, 1.008, 24, link_bytes_s=20 * GIGA, network_bytes_s=1.25 * GIGA, host_bytes_s=20 * GIGA),
        Device(
            name="CPU",
            flops=0.1 * TERA,
            memory_bytes_s=20 * GIGA,
            memory_bytes=24 * GIGA,
            node=1,
            link_bytes_s=10 * GIGA,
            network_bytes_s=1.25 * GIGA,
            host_bytes_s=10 * GIGA,
            weight_bytes=4.0,
            start_s=0.002,
        ),
    )
}
"""Devices by name in lower case."""


def find_device(name: str) -> Device:
    """The device of a name. ConfigError with the known names when there is none."""
    found = DEVICES.get(name.lower().replace(" ", "").replace("-", ""))
    if found is None:
        known = ", ".join(device.name for device in DEVICES.values())
        raise ConfigError(f"no device {name!r} is known; write one of {known}, or give its numbers with --device")
    return found


def parse_device(text: str) -> Device:
    """A device from "name=X,tflops=989,tb_s=3.35,gb=80,node=8"; what is left out is as on an H100."""
    values: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"--device {text!r}: {part!r} is not of the form key=value")
        values[key.strip()] = value.strip()
    scales = {
        "tflops": ("flops", TERA),
        "tb_s": ("memory_bytes_s", TERA),
        "gb": ("memory_bytes", GIGA),
        "node": ("node", 1),
        "link_gb_s": ("link_bytes_s", GIGA),
        "network_gb_s": ("network_bytes_s", GIGA),
        "host_gb_s": ("host_bytes_s", GIGA),
    }
    changes: dict[str, float | int | str] = {"name": values.pop("name", "device")}
    for key, value in values.items():
        if key not in scales:
            raise ConfigError(f"--device {text!r}: no key {key!r}; there are name, {', '.join(scales)}")
        field, scale = scales[key]
        try:
            number = float(value)
        except ValueError:
            raise ConfigError(f"--device {text!r}: {key} = {value!r} is no number") from None
        if not 0 < number < 1e9:
            raise ConfigError(f"--device {text!r}: {key} = {value}: it must be above 0")
        changes[field] = round(number) if field == "node" else number * scale
    return msgspec.structs.replace(DEVICES["h100"], **changes)
