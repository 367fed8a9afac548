"""A page to look at: one HTML file of a run or a plan, or served while a run goes on.

What is shown is data in, text out: `document` has the page, `curves` what happened over steps,
`machine` what was planned, `words` settings and samples, `markup` the only way in which text
becomes HTML, `serving` the server. `page.js` draws with plotly.js, which is put into the page.
"""

from l2l.page.curves import run_sections
from l2l.page.document import (
    MEASURED,
    PLANNED,
    Document,
    PageError,
    Section,
    content_of,
    page_of,
    require_library,
)
from l2l.page.machine import budget_section, choices_section, ledger_section, step_section
from l2l.page.serving import serve
from l2l.page.words import note_section, samples_section, settings_section
