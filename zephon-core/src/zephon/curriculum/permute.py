"""Keyed hashes and permutations over arrays: the only source of randomness in the curriculum.

Everything is integer arithmetic modulo 2**64, so a result is the same on every platform and NumPy version.
The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014); permutations of large domains are balanced Feistel networks with cycle walking
(Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
"""

from __future__ import annotations

import hashlib

import numpy as np

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB
_FEISTEL_ROUNDS = 6


def derive_key(*parts: object) -> int:
    """A 64-bit key from names and numbers, by SHA-256 of their written form."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _M1) & _MASK
    x = ((x ^ (x >> 27)) * _M2) & _MASK
    return x ^ (x >> 31)


def mix_key(key: int, *numbers: int) -> int:
    """A 64-bit key from another one and some whole numbers; cheaper than `derive_key`."""
    for number in numbers:
        key = _mix(((key ^ ((number * _GAMMA) & _MASK)) + _GAMMA) & _MASK)
    return key


def hash64(key: int | np.ndarray, values: np.ndarray) -> np.ndarray:
    """uint64[n], one hash per value of `values` (any integer array); `key` is one number, or uint64[n]."""
    x = values.astype(np.uint64)
    x *= np.uint64(_GAMMA)
    x += np.uint64(key) if isinstance(key, int) else key
    return _mixed(x)


def mix_keys(key: int, numbers: np.ndarray) -> np.ndarray:
    """uint64[n]: `mix_key(key, number)` for every whole number of `numbers`, which are at least 0."""
    x = numbers.astype(np.uint64)
    x *= np.uint64(_GAMMA)
    x ^= np.uint64(key)
    x += np.uint64(_GAMMA)
    return _mixed(x)


def _mixed(x: np.ndarray) -> np.ndarray:
    """`_mix` of every value, in place."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(_M1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_M2)
    x ^= x >> np.uint64(31)
    return x


def shuffled_indices(key: int, n: int) -> np.ndarray:
    """A uniformly random order of 0 to n - 1 as int64[n], fixed by `key`."""
    return shuffled_rows(np.array([key], dtype=np.uint64), n)[0]


def shuffled_rows(keys: np.ndarray, n: int) -> np.ndarray:
    """int64[len(keys), n]: `shuffled_indices` of each of some keys uint64[m]."""
    # `hash64` maps distinct numbers to distinct hashes, so there are no ties and any kind of sort gives the same order.
    hashes = hash64(np.repeat(keys, n), np.tile(np.arange(n, dtype=np.uint64), len(keys)))
    return np.argsort(hashes.reshape(-1, n), axis=1).astype(np.int64, copy=False)


def feistel(key: int | np.ndarray, n: int | np.ndarray, index: np.ndarray) -> np.ndarray:
    """The images int64[m] of `index` int64[m] under a permutation of 0 to n - 1 fixed by `key`.

    With uint64[m] keys or int64[m] sizes (below 2**53), each index goes through the permutation of its own. Costs the
    same for any `n`: no array of the whole domain is ever made.
    """
    limit, keys = np.atleast_1d(np.asarray(n, dtype=np.uint64)), np.atleast_1d(np.asarray(key, dtype=np.uint64))
    lengths = (
        np.frexp((limit - np.uint64(1)).astype(np.float64))[1] if isinstance(n, np.ndarray) else (n - 1).bit_length()
    )
    bits = np.atleast_1d(np.maximum(1, (lengths + 1) // 2)).astype(np.uint64)
    mask = (np.uint64(1) << bits) - np.uint64(1)
    round_keys = [hash64(r, keys) for r in range(_FEISTEL_ROUNDS)]

    def encrypt(x: np.ndarray, of: np.ndarray | slice) -> np.ndarray:
        half, low = _of(bits, of), _of(mask, of)
        left, right = x >> half, x & low
        for each in round_keys:
            left, right = right, left ^ (hash64(_of(each, of), right) & low)
        return (left << half) | right

    out = encrypt(index.astype(np.uint64), slice(None))
    # The network permutes up to 4n values; walking the cycle until it re-enters 0..n-1 permutes exactly those.
    outside = np.flatnonzero(out >= limit)
    while len(outside):
        out[outside] = encrypt(out[outside], outside)
        outside = outside[out[outside] >= _of(limit, outside)]
    return out.astype(np.int64)


def _of(values: np.ndarray, indices: np.ndarray | slice) -> np.ndarray:
    """The value of each index, or the only one there is."""
    return values[indices] if len(values) > 1 else values
