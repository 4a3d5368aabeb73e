"""The built-in environments: a module each, named as the environment is on the command line.

The first line of a module says what the environment is (``--help`` prints it); its ``make`` is the
`EnvironmentFactory`.
"""
