//! Every figure of the store, beside its bar. `cargo bench -p baton-objects --features resp`; the name of one of
//! the groups as an argument runs that one.

use std::time::Duration;

use baton_objects::measure::{self, Bar, Effort, Figure};

type Group = fn(Effort, &mut dyn FnMut(&str)) -> Result<Vec<Figure>, String>;

fn main() {
    let groups: [(&str, Group); 4] = [
        ("copies", measure::copies),
        ("metadata", measure::metadata),
        ("pressure", measure::pressure),
        ("socket", measure::socket),
    ];
    let chosen: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let effort = Effort { memory_bytes: 1 << 30, each: Duration::from_secs(2) };
    for (_, group) in groups.iter().filter(|(name, _)| chosen.is_empty() || chosen.iter().any(|c| c == name))
    {
        match group(effort, &mut |_| {}) {
            Ok(figures) => figures.iter().for_each(show),
            Err(error) => eprintln!("{error}"),
        }
    }
}

fn show(figure: &Figure) {
    let bar = match figure.bar {
        Some(Bar::Least(bar)) => format!("  bar >= {bar}"),
        Some(Bar::Most(bar)) => format!("  bar <= {bar}"),
        None => String::new(),
    };
    let missed = if figure.holds() { "" } else { "  MISSED" };
    println!("{:<48} {:>14.3} {}{bar}{missed}", figure.what, figure.value, figure.unit);
}
