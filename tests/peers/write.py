"""Writes one small dataset per format with the library that the format belongs to: write.py FOLDER.

Runs in a process of its own, with the libraries of requirements.txt laid over the environment. The rows are those of
`rows.py`, which the tests compare with.
"""

import io
import json
import os
import sys
import tarfile
from pathlib import Path

import numpy as np
from rows import LABELS, TEXTS, TOKENS

out = Path(sys.argv[1])


def write_saved():
    from datasets import Dataset, DatasetDict

    dataset = Dataset.from_dict({"text": TEXTS, "label": LABELS, "meta": [{"text": text} for text in TEXTS]})
    dataset.save_to_disk(out / "saved/plain", num_shards=3)
    kept = dataset.filter(lambda row: row["label"] % 2 == 0)  # has an index over the rows, which saving resolves
    kept.save_to_disk(out / "saved/filtered")
    DatasetDict({"train": dataset, "test": kept}).save_to_disk(out / "saved/splits")
    # What people do next leaves further Arrow files in the folder, which are no part of the dataset.
    Dataset.load_from_disk(out / "saved/plain").map(lambda row: {"text": row["text"].upper()})


def write_webdataset():
    import webdataset as wds

    for name in ("samples-{}.tar", "samples-{}.tar.gz"):
        folder = out / "webdataset" / ("packed" if name.endswith("gz") else "plain")
        folder.mkdir(parents=True)
        for shard in range(2):
            with wds.TarWriter(str(folder / name.format(shard))) as sink:
                for n in range(shard * 100, shard * 100 + 100):
                    sample = {
                        "__key__": f"part{shard}/{n:06}",
                        "txt": TEXTS[n],
                        "json": {"label": LABELS[n], "t": TEXTS[n]},
                    }
                    if n % 3 == 0:
                        sample["jpg"] = bytes([n % 256]) * 40
                    if n % 5 == 0:
                        sample["seg.cls"] = LABELS[n]
                    sample["state.pyd"] = {"n": n}
                    sink.write(sample)
    # Archives of other writers: GNU's long names, pax headers, folders, links, members that belong to no sample.
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT):
        path = out / "webdataset/kinds" / f"kind{kind}.tar"
        path.parent.mkdir(exist_ok=True)
        with tarfile.open(path, "w", format=kind) as archive:

            def add(name, content=b"", archive=archive, **fields):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                for field, value in fields.items():
                    setattr(info, field, value)
                archive.addfile(info, io.BytesIO(content))

            folder = "é" * 60 if kind != tarfile.USTAR_FORMAT else "e" * 90
            add("folder", type=tarfile.DIRTYPE)
            add("README", b"about")
            add(".hidden.txt", b"hidden")
            for n in range(10):
                add(f"{folder}/{'x' * 90}{n}.TXT", TEXTS[n].encode(), mtime=1.5 if kind == tarfile.PAX_FORMAT else 1)
                add(f"{folder}/{'x' * 90}{n}.link", type=tarfile.SYMTYPE, linkname="../../../etc/passwd")
            add("../../outside.txt", b"outside")


def write_mds():
    from streaming import MDSWriter

    columns = {
        "text": "str",
        "tokens": "ndarray:uint16",
        "open": "ndarray",
        "fixed": "ndarray:int32:4",
        "n": "int",
        "small": "uint8",
        "score": "float32",
        "raw": "bytes",
        "meta": "json",
        "anything": "pkl",
    }
    for compression in (None, "zstd:3", "gz", "bz2", "br", "snappy"):
        folder = out / "mds" / (compression or "plain").split(":")[0]
        with MDSWriter(
            out=str(folder), columns=columns, compression=compression, hashes=["xxh64"], size_limit=1 << 15
        ) as sink:
            for n, text in enumerate(TEXTS):
                sink.write(
                    {
                        "text": text,
                        "tokens": TOKENS[n].astype(np.uint16),
                        "open": TOKENS[n].astype(np.int32),
                        "fixed": np.arange(n, n + 4, dtype=np.int32),
                        "n": n,
                        "small": n % 256,
                        "score": n / 4,
                        "raw": bytes([n % 256]) * (n % 5),
                        "meta": {"text": text},
                        "anything": {n},
                    }
                )


def write_litdata():
    import torch
    from litdata.streaming.item_loader import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    def write(name, items, **options):
        folder = out / "litdata" / name
        folder.mkdir(parents=True)
        writer = BinaryWriter(str(folder), **{"chunk_size": 64, **options})
        for n, item in enumerate(items):
            writer[n] = item
        writer.done()
        writer.merge()

    rows = [
        {
            "text": text,
            "ids": TOKENS[n].astype(np.uint16),
            "n": n,
            "score": n / 4,
            "even": n % 2 == 0,
            "raw": b"x" * (n % 3),
        }
        for n, text in enumerate(TEXTS)
    ]
    write("fields", rows)
    write("texts", TEXTS)
    write("tokens", [torch.tensor(ids.astype(np.int32)) for ids in TOKENS], chunk_size=2000, item_loader=TokensLoader())
    write("frames", rows, compression="zstd", compression_batch_size=16)
    write("items", rows, compression="zstd", compression_level="sample")
    write("whole", rows, compression="zstd", compression_level="chunk")
    plain = [{"text": text, "n": n, "meta": {"text": text, "tags": ["a"] * (n % 3)}} for n, text in enumerate(TEXTS)]
    write("arrow", plain)
    write("arrow-zstd", plain, compression="zstd")
    write("pickled", [{"text": text, "what": {n}} for n, text in enumerate(TEXTS)])


def write_megatron():
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

    for dtype in (np.uint16, np.int32):
        prefix = str(out / "megatron" / np.dtype(dtype).name / "web_text_document")
        os.makedirs(os.path.dirname(prefix))
        builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=dtype)
        for ids in TOKENS:
            builder.add_item(torch.tensor(ids.astype(np.int64)))
            builder.end_document()
        builder.finalize(get_idx_path(prefix))
    prefix = str(out / "megatron/sentences/web_text_sentence")  # several sequences to a document
    os.makedirs(os.path.dirname(prefix))
    builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=np.uint16)
    for ids in TOKENS:
        cut = len(ids) // 3
        builder.add_document(torch.tensor(ids.astype(np.int64)), [cut, len(ids) - cut])
    builder.finalize(get_idx_path(prefix))


for write in (write_saved, write_webdataset, write_mds, write_litdata, write_megatron):
    write()
(out / "done.json").write_text(json.dumps(sorted(os.listdir(out))))
