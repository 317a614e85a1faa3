"""Turns a single-node training program into a trainer program and parameter server programs: pure
graph work.
"""

from transpiler.capture import capture as capture
from transpiler.clip import ClipGradByGlobalNorm as ClipGradByGlobalNorm
from transpiler.clip import ClipGradByNorm as ClipGradByNorm
from transpiler.clip import ClipGradByValue as ClipGradByValue
from transpiler.decayed_adagrad import DecayedAdagrad as DecayedAdagrad
from transpiler.distribute import DistributeTranspiler as DistributeTranspiler
from transpiler.distribute_config import DistributeTranspilerConfig as DistributeTranspilerConfig
from transpiler.ftrl import Ftrl as Ftrl
from transpiler.naming import default_main_program as default_main_program
from transpiler.naming import default_startup_program as default_startup_program
from transpiler.naming import name as name
from transpiler.naming import name_scope as name_scope
from transpiler.naming import program_guard as program_guard
from transpiler.placement import HashName as HashName
from transpiler.placement import RoundRobin as RoundRobin
from transpiler.placement import SizeBalanced as SizeBalanced
from transpiler.placement import slice_variable as slice_variable
from transpiler.strategy import DistributedStrategy as DistributedStrategy

__all__ = [
    "capture",
    "ClipGradByGlobalNorm",
    "ClipGradByNorm",
    "ClipGradByValue",
    "DecayedAdagrad",
    "default_main_program",
    "default_startup_program",
    "DistributedStrategy",
    "DistributeTranspiler",
    "DistributeTranspilerConfig",
    "Ftrl",
    "HashName",
    "name",
    "name_scope",
    "program_guard",
    "RoundRobin",
    "SizeBalanced",
    "slice_variable",
]
