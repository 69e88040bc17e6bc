"""Zephon as the data of training frameworks; a module per framework, which imports it.

automodel       NeMo AutoModel
hugging_face    Trainer of transformers, and its subclasses
lightning       Trainer of Lightning
trl             SFTTrainer of TRL

TorchTitan and Megatron have packages of their own: torchtitan-zephon and megatron-zephon.
"""
