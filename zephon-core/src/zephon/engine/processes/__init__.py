"""Child processes: how they start and end, and how blocks of columns travel.

child.py     a child process, which never outlives its parent
channel.py   objects between two processes, their arrays through shared memory
pool.py      worker processes that run stateless functions
isolated.py  an engine that runs in a process of its own
"""
