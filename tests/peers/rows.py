"""The rows of the datasets that write.py writes."""

import numpy as np

TEXTS = ["" if n == 7 else f"document {n} é漢字 " * (n % 9 + 1) for n in range(200)]
LABELS = [n % 10 for n in range(200)]
TOKENS = [(np.arange(n * 7 % 50 + 1) * 31 + n) % 50000 for n in range(200)]
