"""Operations: what each call of a client sends, waits for and returns, as generators without I/O.

One source for both clients. Imported by links, fake, aio, sync and the runtimes; imports memory and values.
"""
