"""From a single-node program to the programs of a cluster."""

from transpiler.planning import plan_parameters as plan_parameters
from transpiler.planning import plan_program as plan_program
from transpiler.pserver_passes import pserver_program as pserver_program
from transpiler.pserver_passes import pserver_startup as pserver_startup
