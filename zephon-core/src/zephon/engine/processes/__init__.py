"""Other processes at work for this one: how they are started and ended, and how blocks of columns travel.

child.py     a process of our own, which never outlives this one
channel.py   objects between two processes, their arrays through memory that both share
pool.py      worker processes that run stateless functions
isolated.py  an engine that runs in a process of its own
"""
