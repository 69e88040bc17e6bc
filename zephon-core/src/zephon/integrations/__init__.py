"""Zephon as the data of training frameworks; a module per framework, which imports it.

hugging_face    Trainer of transformers, and its subclasses
trl             SFTTrainer of TRL

TorchTitan and Megatron have packages of their own: torchtitan-zephon and megatron-zephon.
"""
