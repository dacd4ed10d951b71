//! Wide tables with rows for parts of runs: their classes, tenants, predictions and bounds.

use super::lines::paragraph;
use super::names::key;
use super::text::escape;

/// A table with its title and what it shows, by the heads of its words and of its figures.
#[must_use]
pub(super) fn table(title: &str, note: &str, (words, figures): (&[&str], &[&str]), rows: &str) -> String {
    let mut html = format!(
        "<figure class=\"wide\"><figcaption><h3>{title}</h3>{}</figcaption><div class=\"scroll\" tabindex=\"0\" \
         role=\"region\" aria-label=\"{title}\"><table><thead><tr><th scope=\"col\">run</th>",
        paragraph(note)
    );
    html.extend(words.iter().map(|head| format!("<th scope=\"col\">{head}</th>")));
    html.extend(figures.iter().map(|head| format!("<th scope=\"col\" class=\"n\">{head}</th>")));
    html + "</tr></thead><tbody>" + rows + "</tbody></table></div></figure>"
}

/// A row of the run with that number and label.
#[must_use]
pub(super) fn row((at, label): (usize, &str), words: &[&str], figures: &[String]) -> String {
    let mut html = format!("<tr class=\"r{at}\"><th scope=\"row\">{}</th>", key(at, label));
    html.extend(words.iter().map(|word| format!("<td>{}</td>", escape(word))));
    html.extend(figures.iter().map(|figure| format!("<td class=\"n\">{figure}</td>")));
    html + "</tr>"
}
