"""Datasets: named collections of documents, on storage or in memory."""

from zephon.data.cache import DecodeCache
from zephon.data.catalog import Catalog
from zephon.data.dataset import Dataset
from zephon.data.reader import OpenDataset

__all__ = ["Catalog", "Dataset", "DecodeCache", "OpenDataset"]
