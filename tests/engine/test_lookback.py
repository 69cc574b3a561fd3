"""Each row's own id and those before it, as Engram's n-grams read them (backbone.md section 11)."""

from array import array
from types import SimpleNamespace

from rocline.engine.handoff import Reach, RowKind, RowSpan
from rocline.engine.layers.head import lookback_rows

N_BACK = 4


def test_rows_look_back_within_their_sequence_alone(rng):
    config = SimpleNamespace(engram_max_ngram_size=N_BACK)
    ids = {number: array("i", rng.integers(0, 1000, 50).tolist()) for number in range(5)}
    reach = Reach(50, 16, 5, 2)
    for _ in range(50):
        spans = []
        for number in range(rng.integers(1, 6)):
            start, n_rows = int(rng.integers(0, 40)), int(rng.choice([1, 1, 2, 9]))
            spans.append(RowSpan(number, min(start, 50 - n_rows), n_rows, RowKind.PREFILL, reach, 0))
        want = []
        for span in spans:
            own = ids[span.sequence]
            for position in range(span.start, span.end):
                want.append([own[position - back] if position >= back else -1 for back in range(N_BACK)])
        got = lookback_rows(config, spans, ids)  # type: ignore[arg-type]
        assert got.tolist() == want
        assert got.is_contiguous()
