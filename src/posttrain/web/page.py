"""What all pages share: templates that escape what users wrote, and one style sheet."""

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from posttrain.web import wording
from posttrain.web.charts import chart_style


def environment_of_pages() -> Environment:
    """The templates; a name that is not given is an error."""
    environment = Environment(
        loader=PackageLoader("posttrain.web"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "duration": wording.duration_text,
        "metric_name": wording.metric_name,
        "words": wording.reason_text,
    }
    return environment


def style(environment: Environment) -> Markup:
    """The style sheet of pages and charts."""
    return Markup(environment.get_template("report.css").render() + chart_style())
