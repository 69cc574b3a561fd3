"""Engram's host side: compressed token ids and the table rows' place in memory (backbone.md section 11.1, 11.4)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor

from rocline.engine.config import ConfigError, TextConfig
from rocline.engine.ngrams import NgramTable
from rocline.hip_kernels.engram import engram_hash

_SPACE_GUARD = "\ue000"  # private use: keeps a lone space through the strip
_NORMALISER = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), _SPACE_GUARD),
        normalizers.Strip(),
        normalizers.Replace(_SPACE_GUARD, " "),
    ]
)


def compressed_id_map(tokenizer: Tokenizer) -> np.ndarray:
    """[vocab] int32: each token id's compressed id, numbered by first sight of its normalised text.

    A token that is not whole UTF-8 keeps its raw string as key, and so does text that normalises to nothing.
    """
    ids: dict[str, int] = {}
    out = np.empty(tokenizer.get_vocab_size(with_added_tokens=True), dtype=np.int32)
    for token in range(len(out)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        whole = "\ufffd" not in text
        key = (_NORMALISER.normalize_str(text) or text) if whole else str(tokenizer.id_to_token(token))
        out[token] = ids.setdefault(key, len(ids))
    return out


def load_id_map(folder: str | Path, config: TextConfig) -> np.ndarray:
    """compressed_id_map of FOLDER/tokenizer.json, checked against the configuration that the hash was built for.

    Raises ConfigError: every multiplier depends on the number of distinct ids.
    """
    path = Path(folder) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{path}: {error}") from error
    id_map = compressed_id_map(tokenizer)
    found = (len(id_map), int(id_map.max()) + 1)
    wanted = (config.vocab_size, config.engram_compressed_vocab_size)
    if found != wanted:
        raise ConfigError(
            f"{path}: {found[0]} tokens with {found[1]} compressed ids; config.json has vocab_size = {wanted[0]} and "
            f"engram_compressed_vocab_size = {wanted[1]}; the two files must come from one release"
        )
    return id_map


def table_room(n_rows: int, row_bytes: int) -> Tensor:
    """[n_rows, row_bytes] bytes of host memory, not initialised, for a table's codes or scales.

    numpy asks the kernel for huge pages, torch does not: rows far apart are read three times as fast from them.
    """
    return torch.from_numpy(np.empty((n_rows, row_bytes), dtype=np.uint8))


@dataclass(frozen=True)
class EngramTable:
    """One Engram layer's table and hash, ready for the operators.

    codes_e4m3 [rows, d], scales_e8m0 [rows, d/32]   in host memory, or mapped from the file
    map_i64 [V]        compressed id of every token
    pad                compressed id of a blocked lookback
    """

    codes_e4m3: Tensor
    scales_e8m0: Tensor
    map_i64: Tensor
    multipliers_i64: Tensor
    primes_i64: Tensor
    offsets_i64: Tensor
    pad: int

    @classmethod
    def build(
        cls, ngrams: NgramTable, codes_e4m3: Tensor, scales_e8m0: Tensor, id_map: np.ndarray, pad_token: int
    ) -> EngramTable:
        return cls(
            codes_e4m3,
            scales_e8m0,
            torch.from_numpy(id_map.astype(np.int64)),
            torch.tensor(ngrams.multipliers),
            torch.tensor(ngrams.primes),
            torch.tensor(ngrams.offsets),
            int(id_map[pad_token]),
        )

    def compressed(self, lookback_i32: Tensor) -> Tensor:
        """Compressed ids of token ids [R, N], int64; -1 (dead, or before the start) stays -1."""
        tokens_i32, map_i64 = lookback_i32.numpy(), self.map_i64.numpy()
        return torch.from_numpy(np.where(tokens_i32 >= 0, map_i64[np.maximum(tokens_i32, 0)], -1))

    def hash_rows(self, lookback_i32: Tensor, rows_i64: Tensor) -> None:
        """Fill rows_i64 [R, C] with the table rows of token ids [R, N]."""
        lookback_i64 = self.compressed(lookback_i32)
        engram_hash(lookback_i64, self.multipliers_i64, self.primes_i64, self.offsets_i64, self.pad, rows_i64)

    def copy_rows(self, rows_i64: Tensor, codes_e4m3: Tensor, scales_e8m0: Tensor) -> None:
        """Fill codes_e4m3 [R, C, d] and scales_e8m0 [R, C, d/32] with table rows rows_i64 [R, C], as stored."""
        for stored, out in ((self.codes_e4m3, codes_e4m3), (self.scales_e8m0, scales_e8m0)):
            torch.index_select(stored, 0, rows_i64.flatten(), out=out.flatten(0, 1))
