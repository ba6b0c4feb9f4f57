"""The daemon as a process: assembly from settings, start, reload, signals and end.

Everything below it is wired together here and nowhere else.
Imported by the command line.
"""
