"""The built-in environments: one module for each, with its name on the command line.

The first line of a module's docstring describes the environment, and ``--help`` prints it; its
``make`` is the `EnvironmentFactory`.
"""
