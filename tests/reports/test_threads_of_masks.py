"""Masks that several threads make at once."""

import gc

import torch

from tilewise import caching


def test_storages_are_swept_while_other_threads_make_masks(monkeypatch):
    """Whatever runs while the sweep allocates, as another thread does, may track a tensor."""
    # So many that list() would allocate tuples for them, beside those that Python keeps.
    others = [torch.zeros(1) for _ in range(3200)]
    monkeypatch.setattr(caching, "_tracked", {})
    for t in others[:3000]:
        caching.keep_track(t)
    monkeypatch.setattr(caching, "_few", 0)
    left, before = others[3000:], gc.get_threshold()

    def another(phase, _):
        if phase == "start" and left:
            storage = left.pop().untyped_storage()
            caching._tracked[storage._cdata] = caching.StorageWeakRef(storage)

    gc.callbacks.append(another)
    gc.set_threshold(1)
    try:
        caching.keep_track(torch.zeros(1))
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(another)
    assert all(caching.is_tracked(t) for t in others[:3000])
