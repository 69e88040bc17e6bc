"""Pixels that workers make ahead, in the form that the last batch was asked for."""

import gc
import pickle
import sys
import threading
from collections import deque
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from support.vision_data import file_of, image_tokenizer, normalized, picture
from zephon import Pipeline, VisionSettings
from zephon.columns.images import Images, PixelForm, PixelsAhead, ReadyPixels
from zephon.columns.records import RecordBlock
from zephon.config.options import FaultPolicy
from zephon.engine.pixels import PixelStage
from zephon.io import Dataset
from zephon.vision.pixels import grey_patches, image_patches
from zephon.work import StaticMixtureWorkSource

VISION = VisionSettings(patch_size=8, min_pixels=256, max_pixels=4096)
FORMS = [PixelForm(layout, dtype) for layout in ("packed", "padded") for dtype in ("float32", "uint8")]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    files = [file_of(picture(30 + 5 * n, 90 - 6 * n, seed=n)) for n in range(9)]
    files[4] = files[4][: len(files[4]) // 2]  # grey
    images = Dataset.from_dict("images", {"image": files, "text": [f"picture {n}" for n in range(9)]})
    words = Dataset.from_dict("words", {"text": [f"words alone {n}" for n in range(40)]})
    return images, words, image_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def pipeline(data, microbatch=3, **options):
    images, words, tokenizer = data
    source = StaticMixtureWorkSource(datasets=[images, words], mixture={"images": 1.0, "words": 1.0}, seed=1)
    return (
        Pipeline(source)
        .options(canonical_replicas=1, on_error="skip", error_budget=0.5, **options)
        .tokenize_images(tokenizer, vision=VISION, datasets=["images"])
        .tokenize(tokenizer, datasets=["words"])
        .pack_sequences(64, max_documents_per_record=2)
        .batch(microbatch)
    )


@pytest.mark.parametrize("form", FORMS, ids=["-".join(form) for form in FORMS])
@pytest.mark.parametrize("runner", ["threads", "inline"])
def test_pixels_made_ahead_are_those_made_on_demand(data, form, runner):
    one, ahead = pipeline(data, runner=runner), 0
    for batch, _ in zip(one, range(12), strict=False):
        images = batch.block.images
        ready = None if images is None else images.ready_values(form)
        first, again = (batch.to_training(vision=form.layout, pixel_dtype=form.dtype, as_numpy=True) for _ in range(2))
        assert np.array_equal(first["pixel_values"], again["pixel_values"])
        assert first["pixel_values"].dtype == form.dtype
        if ready is not None:
            ahead += 1
            assert np.shares_memory(first["pixel_values"], ready)
            assert not np.shares_memory(again["pixel_values"], ready)  # the first may have been written to
        other = batch.to_training(vision=form.layout, pixel_dtype=form.dtype, as_numpy=True)
        assert np.array_equal(first["grid_thw"], other["grid_thw"])
    assert ahead >= 3
    one.close()


def test_a_batch_cut_elsewhere_or_asked_for_another_form_makes_its_own(data):
    """As after a resume inside a round: microbatches that are not those that were made side by side."""
    one, whole = pipeline(data), pipeline(data, microbatch=1)
    whole.compiled.plan.pixels.wanted.form = PixelForm()
    single, made = iter(whole), 0
    for batch, _ in zip(one, range(6), strict=False):
        parts = [next(single).block for _ in range(3)]
        joined = RecordBlock.concat(parts[:1] + parts[1:])
        values = batch.to_training(as_numpy=True)["pixel_values"]
        if joined.images is not None:
            ready = joined.images.ready_values(PixelForm())
            assert ready is None or np.array_equal(ready, values)
            assert np.array_equal(np.concatenate(joined.images.patches), np.concatenate(batch.block.images.patches))
            made += ready is None
        padded = batch.to_training(as_numpy=True, vision="padded")["pixel_values"]
        assert padded.sum() == pytest.approx(values.sum(), abs=1)
    assert made
    one.close()
    whole.close()


def test_tensors_that_are_held_keep_their_values(data):
    """A part of a tensor is enough to keep its memory, while that of others is used again."""
    one, held, places = pipeline(data, runner="threads", prefetch_buffer_size=1 << 16), deque(maxlen=3), []
    for batch, _ in zip(one, range(30), strict=False):
        values, own = (batch.to_training()["pixel_values"] for _ in range(2))  # the second is made here
        if len(values):
            places.append(values.data_ptr())
            held.append((values[len(values) // 2 :].reshape(-1, 3), own[len(own) // 2 :].reshape(-1, 3)))
        del values, own
        assert all(torch.equal(part, expected) for part, expected in held)
    one.close()
    assert len(set(places)) < len(places) - 5


def test_memory_is_used_again_once_nothing_refers_to_it():
    ahead = PixelsAhead()
    first = ahead.memory((4, 100), "float32")
    first[:] = 7
    part, address = first[1:2], first.ctypes.data
    del first
    gc.collect()
    other = ahead.memory((4, 100), "float32")
    assert other.ctypes.data != address and (part == 7).all()
    del part
    gc.collect()
    again = ahead.memory((3, 100), "float32")
    assert again.ctypes.data == address
    del other, again
    gc.collect()
    assert ahead.memory((10**6,), "uint8").nbytes == 10**6  # too large for what is free


def test_no_two_hold_the_same_memory():
    """Threads of a stream that ends and of the next one take memory, and consumers let go of it at any moment."""
    ahead, wrong, interval = PixelsAhead(), [], sys.getswitchinterval()

    def use(seed):
        sizes = np.random.default_rng(seed).integers(50, 200, 400).tolist()
        held = deque(maxlen=3)
        for n, size in enumerate(sizes):
            values = ahead.memory((size,), "float32")
            values[:] = mark = seed * 1000 + n
            held.append((values[size // 2 :], mark))
            wrong.extend(part for part, of_part in held if (part != of_part).any())

    def run(seed):
        try:
            use(seed)
        except Exception as error:
            wrong.append(error)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def record(file, grid):
    images = Images(np.array([0, 1]), np.array([grid], dtype=np.int32), pa.array([file], pa.large_binary()))
    block = RecordBlock.filler(1, 16, 0)
    spans = {name: np.zeros(1, dtype=np.int64) for name in ("span_start", "span_dataset", "span_row", "span_token")}
    return RecordBlock(block.tokens, np.array([9]), np.array([0, 1]), **spans, images=images)


class Counting:
    """A runner whose calls are done once they are asked for; how many wait."""

    looks_ahead = True

    def __init__(self, done):
        self.waiting, self.most, self._done = 0, 0, done

    def submit(self, _, function, *args):
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        outer = self

        class Call:
            def done(self):
                return outer._done

            def result(self):
                outer.waiting -= 1
                return function(*args)

        return Call()


@pytest.mark.parametrize(("done", "form"), [(False, None), (False, PixelForm()), (True, PixelForm())])
def test_look_ahead_is_bounded_and_has_a_record_for_each_worker(done, form):
    file = file_of(picture(64, 64))
    grid = (8, 8, 64, 64)
    stage = PixelStage(VISION, ["a"], lambda *_: ("", 0), FaultPolicy(), 5 * 9 * 64 * 64 * 3, workers=3, batch=2)
    stage.wanted.form = form
    runner = Counting(done)
    given = list(stage.ahead(iter([record(file, grid)] * 40), runner))
    assert len(given) == 40 and runner.waiting == 0
    # 12,288 bytes of pixels a record, and as float32 with two frames eight times that beside them.
    assert runner.most == {(False, None): 4, (False, PixelForm()): 6, (True, PixelForm()): 1}[done, form]
    ready = [each.images.ready for each in given]
    if form is None:
        assert ready == [None] * 40
    else:
        assert all(isinstance(each, ReadyPixels) and each.values.shape == (128, 384) for each in ready)
        assert ready[0] is ready[1] is not ready[2]
        joined = RecordBlock.concat(given[:2]).images
        assert joined.ready_values(form) is ready[0].values
        assert RecordBlock.concat(given[1:3]).images.ready_values(form) is None
        assert given[0].images.ready_values(form) is None


def test_pixels_decoded_in_another_process_are_put_into_their_places_here():
    """As with Ray's actors; a grey image has its place, and its document no labels."""
    files = [file_of(picture(64, 64, seed=n)) for n in range(4)]
    files[1] = files[1][: len(files[1]) // 2]
    here = PixelStage(VISION, ["a"], lambda *_: ("", 0), FaultPolicy(), 1 << 30, batch=2)
    there = replace(here, elsewhere=lambda record: pickle.loads(pickle.dumps(here.decoded(record))))
    there.wanted.form = PixelForm()
    given = list(there.ahead(iter([record(file, (8, 8, 64, 64)) for file in files]), Counting(done=True)))
    for n in (0, 2):
        joined = RecordBlock.concat(given[n : n + 2])
        grid = VISION.grid(64, 64)
        second = grey_patches(grid, VISION) if n == 0 else image_patches(files[3], grid, VISION)
        expected = [image_patches(files[n], grid, VISION), second]
        values = joined.images.ready_values(PixelForm())
        assert np.array_equal(values, normalized(np.concatenate(expected), VISION))
        assert joined.images.is_grey.tolist() == [False, n == 0]
    assert given[0].loss is None and not given[1].loss[0, :9].any() and given[2].loss is None


@pytest.mark.parametrize(("workers", "batch", "most"), [(3, 2, 32), (10, 1, 40)])
def test_look_ahead_is_bounded_by_microbatches_where_images_are_tiny(workers, batch, most):
    stage = PixelStage(VISION, ["a"], lambda *_: ("", 0), FaultPolicy(), 1 << 40, workers=workers, batch=batch)
    stage.wanted.form = PixelForm()
    runner = Counting(done=False)
    assert len(list(stage.ahead(iter([record(file_of(picture(64, 64)), (8, 8, 64, 64))] * 100), runner))) == 100
    assert runner.most == most + 1  # one is handed in before one is given out


def test_a_large_picture_is_decoded_alone(monkeypatch):
    from zephon.vision import pixels

    monkeypatch.setattr(pixels, "_LARGE", 64 * 64)
    grid, inside, most = VISION.grid(90, 64), [], []
    usual = pixels._decoded

    def decoded(*args):
        inside.append(1)
        most.append(len(inside))
        threading.Event().wait(0.02)
        try:
            return usual(*args)
        finally:
            inside.pop()

    monkeypatch.setattr(pixels, "_decoded", decoded)
    for size, expected in (((90, 64), 1), ((64, 60), 2)):
        most.clear()
        grid = VISION.grid(*size)
        file = file_of(picture(*size))
        running = [threading.Thread(target=pixels.image_patches, args=(file, grid, VISION)) for _ in range(2)]
        for each in running:
            each.start()
        for each in running:
            each.join()
        assert max(most) == expected


def test_explain_tells_the_memory_of_pixels_and_decoding(data):
    one = pipeline(data, runner="threads")
    workers, told = one.compiled.plan.pixels.workers, one.explain()
    # 65 tokens, 4 patches each, 192 values of one frame and 384 of two as float32; four microbatches of three records.
    record = 65 * 4 * (192 + 4 * 384)
    assert f"{(256 << 20) / 2**20 + 12 * record / 2**20:.1f} MiB of pixels ready or in the making" in told
    decoding = 16 * (178_956_970 + (workers - 1) * (1 << 24))
    assert f"{decoding / 2**30:.1f} GiB while 179 megapixels, the most, are decoded" in told
