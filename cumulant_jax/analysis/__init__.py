"""Tables, figures and reports about trained models; needs the extra `analysis` (Matplotlib)."""

from cumulant_jax.analysis.environment import describe_environment as describe_environment
from cumulant_jax.analysis.plots import Band as Band
from cumulant_jax.analysis.plots import Curve as Curve
from cumulant_jax.analysis.plots import accuracy_against_time as accuracy_against_time
from cumulant_jax.analysis.plots import bands as bands
from cumulant_jax.analysis.plots import learning_curves as learning_curves
from cumulant_jax.analysis.plots import overview as overview
from cumulant_jax.analysis.plots import save_png as save_png
from cumulant_jax.analysis.plots import to_svg as to_svg
from cumulant_jax.analysis.report import Comparison as Comparison
from cumulant_jax.analysis.report import to_html as to_html
from cumulant_jax.analysis.report import to_markdown as to_markdown
from cumulant_jax.analysis.styles import KIND_STYLES as KIND_STYLES
from cumulant_jax.analysis.styles import KindStyle as KindStyle
from cumulant_jax.analysis.styles import kind_style as kind_style
from cumulant_jax.analysis.tables import KindSummary as KindSummary
from cumulant_jax.analysis.tables import RunResult as RunResult
from cumulant_jax.analysis.tables import Spread as Spread
from cumulant_jax.analysis.tables import summarize as summarize
from cumulant_jax.analysis.tables import to_csv as to_csv
