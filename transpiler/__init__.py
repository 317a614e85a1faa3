"""Turns a single-node training program into a trainer program and parameter server programs: pure graph work."""

from transpiler.decayed_adagrad import DecayedAdagrad as DecayedAdagrad
from transpiler.ftrl import Ftrl as Ftrl
