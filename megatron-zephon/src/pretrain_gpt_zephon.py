"""`python -m pretrain_gpt_zephon`: the program of `megatron_zephon.pretrain_gpt_zephon`, under its own name."""

from megatron_zephon.pretrain_gpt_zephon import main

if __name__ == "__main__":
    main()
