"""Workers in other processes: how they start and end, and how blocks of columns travel.

pool.py      workers that run stateless functions, wherever they are
child.py     a child process, which never outlives its parent
channel.py   objects between two processes, their arrays through shared memory
children.py  workers that are child processes
actors.py    workers that are actors of a Ray cluster
isolated.py  an engine that runs in a process of its own
"""
