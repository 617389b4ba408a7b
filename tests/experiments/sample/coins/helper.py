"""No experiment: a module that only talks about one.

EXPERIMENT = None
"""

NOT_AN_EXPERIMENT = True
