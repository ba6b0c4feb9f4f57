"""Operations: what each call of a client sends, waits for and returns, as generators without I/O.

One source for both clients. Imported by links, fake, aio, sync and the runtimes; imports memory and values.
base.py has the simple calls and the steps that all share, effects.py what an operation asks of its driver,
answers.py what an answer must look like to be believed.

The bytes of a block travel in one of four ways. Everything here has the name of its way:

    way         copied by    calls of the daemon                 where
    one-sided   the client   none                                gets.py, memory/one_sided.py
    leased      the client   Acquire, MapExtents, Release        gets.py, leases.py
    streamed    gRPC         Get, Put                            gets.py, leases.py, puts.py
    direct      the daemon   RegisterPages, GetPages, PutPages   direct.py

A get of `Client.get` begins one-sided and goes on leased from the first block in doubt; where there is no
shared memory it is streamed. A get of `Pages.get` is direct. A put is staged (copied into the staging extent,
then Commit), streamed, or direct. Other words that look like ways are none:

    shared memory   what one-sided and leased gets read: extents of the daemon, mapped read-only
    encoded         form of one fragment of a streamed get or put; the others travel raw (stream_codecs.py)
    pages           what a direct get fills and a direct put reads (page_layouts.py says how they lie)
    view            a fragment of a lease, read where it lies instead of copied
"""
