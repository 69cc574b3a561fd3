"""What comparing with golden data finds: one line an item, and the measures of difference behind it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Verdict = Literal["exact", "within", "failed", "informative", "not read"]
CPU_OF_THE_DATA = "AVX512"  # other vector units add in other orders, and round exponentials otherwise
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


@dataclass(frozen=True)
class Finding:
    """One item compared.

    measure  what `worst` counts; with `bound` and `limit` the rule: worst <= limit, or worst >= limit
    where    the place of the worst value: layer, row, index
    note     why bits differ where the contract says they must, or what was left out
    """

    folder: str
    item: str
    verdict: Verdict
    measure: str = ""
    worst: float | None = None
    bound: Literal["<=", ">="] = "<="
    limit: float | None = None
    where: str = ""
    note: str = ""

    def row(self) -> dict[str, Any]:
        """Plain values for JSON, which has no infinity: a worst value that is not finite becomes null."""
        fields = asdict(self)
        if self.worst is not None and not math.isfinite(self.worst):
            fields["worst"] = None
        return fields


class Findings:
    """The findings about one folder, told to `tell` as they come. on_host: of results that this CPU computed."""

    def __init__(self, folder: str, tell: Callable[[Finding], None], on_host: bool = True) -> None:
        self.folder = folder
        self._tell = tell
        self.on_host = on_host
        self._is_sharp = on_host and adds_like_the_data()

    def at_most(
        self, item: str, measure: str, worst: float, limit: float, exact: bool, where: str = "", note: str = ""
    ) -> None:
        """`exact` where the bits are the recorded ones, else judged by worst <= limit. NaN fails."""
        verdict: Verdict = "exact" if exact else "within" if worst <= limit else "failed"
        where = "" if exact else where
        self._tell(Finding(self.folder, item, verdict, measure, worst, "<=", limit, where, note))

    def at_least(self, item: str, measure: str, worst: float, limit: float, where: str = "", note: str = "") -> None:
        """Judged by worst >= limit; `exact` at 1, the whole."""
        verdict: Verdict = "exact" if worst == 1 else "within" if worst >= limit else "failed"
        where = "" if worst == 1 else where
        self._tell(Finding(self.folder, item, verdict, measure, worst, ">=", limit, where, note))

    def on_cpu(self, item: str, measure: str, worst: float, limit: float, where: str = "") -> None:
        """A sharper limit, for a CPU whose library sums are those of the data; on another only the figure."""
        if self._is_sharp:
            self.at_most(f"cpu: {item}", measure, worst, limit, worst == 0, where)
        else:
            note = f"limit {limit:.2g} on a CPU with {CPU_OF_THE_DATA}, as the data was made on"
            self.informative(f"cpu: {item}", measure, worst, where, note)

    def elements(self, item: str, measure: str, errors: Tensor, limit: float, exact: bool, note: str = "") -> None:
        """At most `limit` in every element of `errors`, named by its index."""
        worst, index = worst_of(errors)
        self.at_most(item, measure, worst, limit, exact, str(index), note)

    def same(self, item: str, got: Tensor, want: Tensor, note: str = "") -> None:
        """Every element equal, by bits."""
        if got.shape != want.shape:
            self.failed(item, f"shape {list(got.shape)}, recorded {list(want.shape)}")
            return
        differ = ~equal_bits(got, want)
        n_differ, (_, index) = int(differ.sum()), worst_of(differ.float())
        self.at_most(item, "elements", n_differ, 0, n_differ == 0, f"first {index}", note)

    def failed(self, item: str, note: str) -> None:
        """An item that could not be compared at all."""
        self._tell(Finding(self.folder, item, "failed", note=note))

    def informative(self, item: str, measure: str, worst: float, where: str = "", note: str = "") -> None:
        """A figure that passes no judgement."""
        self._tell(Finding(self.folder, item, "informative", measure, worst, where=where, note=note))

    def not_read(self, item: str, note: str) -> None:
        """Data that this build has no use for yet."""
        self._tell(Finding(self.folder, item, "not read", note=note))


def adds_like_the_data() -> bool:
    """Whether library sums and exponentials of this CPU are those of the one that made the data."""
    return torch.backends.cpu.get_cpu_capability() == CPU_OF_THE_DATA


def worst_of(errors: Tensor) -> tuple[float, list[int]]:
    """The largest of errors (NaN is larger than all) and its index, the first of equals."""
    flat = errors.flatten().masked_fill(errors.flatten().isnan(), math.inf)
    index = torch.unravel_index(flat.argmax(), errors.shape)
    return float(flat.max()), [int(i) for i in index]


def equal_bits(got: Tensor, want: Tensor) -> Tensor:
    """Element by element: the same bits, a NaN equal to any NaN."""
    if got.dtype != want.dtype:
        raise TypeError(f"compared as bits: {got.dtype} with {want.dtype}")
    if got.dtype not in _BITS:
        return got == want
    bits = _BITS[got.dtype]
    return (got.contiguous().view(bits) == want.contiguous().view(bits)) | (got.isnan() & want.isnan())


def same_bits(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and bool(equal_bits(got, want).all())


def bf16_ulps(got_bf16: Tensor, want_bf16: Tensor) -> Tensor:
    """Representable BF16 values from one to the other, FP32; infinite where one is NaN and the other not."""
    places = []
    for x in (got_bf16, want_bf16):
        bits = x.contiguous().view(torch.int16).int()
        places.append(torch.where(bits < 0, -(bits & 0x7FFF), bits))
    ulps = (places[0] - places[1]).abs().float()
    one_nan, both_nan = got_bf16.isnan() ^ want_bf16.isnan(), got_bf16.isnan() & want_bf16.isnan()
    return ulps.masked_fill(one_nan, math.inf).masked_fill(both_nan, 0)


def relative(got: Tensor, want: Tensor) -> Tensor:
    """|got - want| / |want|, 0 where both are 0."""
    return ((got - want).abs() / want.abs()).masked_fill(got == want, 0)


def relative_rms(got: Tensor, want: Tensor) -> float:
    """sqrt(mean (got - want)^2) / sqrt(mean want^2); -inf must stand in the same places, and is left out.

    Infinite where it does not, and where a value is NaN.
    """
    got, want = got.double(), want.double()
    masked = want == -math.inf
    if not torch.equal(got == -math.inf, masked):
        return math.inf
    difference, want = (got - want)[~masked], want[~masked]
    if not difference.any():  # NaN counts as any
        return 0.0
    rms = float(difference.square().mean().sqrt() / want.square().mean().sqrt())
    return math.inf if math.isnan(rms) else rms


def row_errors(got: Tensor, want: Tensor) -> Tensor:
    """[R] ||got - want|| / ||want|| of each row [R, V]."""
    return (got.double() - want.double()).norm(dim=1) / want.double().norm(dim=1)


def jaccard(got_i32: Tensor, want_i32: Tensor) -> Tensor:
    """[R] overlap of two lists a row [R, K] of distinct indices with -1 for no entry; 1 where both are empty."""
    hit = (got_i32[:, :, None] == want_i32[:, None]) & (got_i32 >= 0)[:, :, None]
    common = hit.sum((1, 2)).double()
    union = (got_i32 >= 0).sum(1) + (want_i32 >= 0).sum(1) - common
    return (common / union).masked_fill(union == 0, 1)
