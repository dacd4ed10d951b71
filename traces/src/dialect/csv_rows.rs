//! The CSV dialects: Azure, BurstGPT, splitwise-sim, Vidur. They hold lengths and no prefix ids.

use csv::StringRecord;

use crate::dialect::Dialect;
use crate::error::RowFault;
use crate::flat::Stamp;
use crate::moment::stamp_ms;
use crate::parser::{Parse, Row, Setup, length};
use crate::record::{Extra, Record};

/// Names a dialect's columns go by, in comparable form.
struct Names {
    timestamp: &'static [&'static str],
    input: &'static [&'static str],
    output: &'static [&'static str],
    session: &'static str,
    request: &'static str,
}

fn names(dialect: Dialect) -> Names {
    match dialect {
        Dialect::BurstGptCsv => Names {
            timestamp: &["timestamp"],
            input: &["requesttokens"],
            output: &["responsetokens"],
            session: "sessionid",
            request: "",
        },
        Dialect::SplitwiseCsv => Names {
            timestamp: &["arrivaltimestamp"],
            input: &["promptsize"],
            output: &["tokensize"],
            session: "",
            request: "requestid",
        },
        Dialect::VidurCsv => Names {
            timestamp: &["arrivedat"],
            input: &["numprefilltokens"],
            output: &["numdecodetokens"],
            session: "",
            request: "",
        },
        _ => Names {
            timestamp: &["timestamp"],
            input: &["contexttokens"],
            output: &["generatedtokens"],
            session: "",
            request: "",
        },
    }
}

/// A column name without case, spaces and underscores.
pub(crate) fn comparable(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_lowercase()
}

/// The CSV dialect a header belongs to.
pub(crate) fn dialect_of(header: &[String]) -> Option<Dialect> {
    let columns: Vec<String> = header.iter().map(|name| comparable(name)).collect();
    let has = |wanted: &[&str]| wanted.iter().any(|w| columns.iter().any(|c| c == w));
    [Dialect::AzureCsv, Dialect::BurstGptCsv, Dialect::SplitwiseCsv, Dialect::VidurCsv].into_iter().find(
        |dialect| {
            let names = names(*dialect);
            has(names.input) && has(names.output) && has(names.timestamp)
        },
    )
}

/// Reads the rows of one CSV dialect.
pub(crate) struct CsvDialect {
    setup: Setup,
    timestamp: usize,
    input: usize,
    output: usize,
    session: Option<usize>,
    request: Option<usize>,
    rest: Vec<usize>,
    failed: u64,
}

impl CsvDialect {
    pub(crate) fn new(setup: &Setup) -> Result<Self, RowFault> {
        let names = names(setup.dialect);
        let columns: Vec<String> = setup.header.iter().map(|name| comparable(name)).collect();
        let find = |wanted: &[&str], own: &Option<String>| match own {
            Some(own) => setup.header.iter().position(|name| name == own),
            None => columns.iter().position(|c| wanted.contains(&c.as_str())),
        };
        let need = |wanted: &[&'static str], own: &Option<String>| {
            find(wanted, own).ok_or_else(|| {
                RowFault::parse(
                    format!("no column is called {}", own.as_deref().unwrap_or(wanted[0])),
                    format!("the header names {}; name the dialect or the column", setup.header.join(", ")),
                )
            })
        };
        let timestamp = need(names.timestamp, &setup.columns.timestamp)?;
        let input = need(names.input, &setup.columns.input_length)?;
        let output = need(names.output, &setup.columns.output_length)?;
        let (session, request) = (find(&[names.session], &None), find(&[names.request], &None));
        let known = [Some(timestamp), Some(input), Some(output), session, request];
        let rest = (0..columns.len()).filter(|i| !known.contains(&Some(*i))).collect();
        Ok(Self { setup: setup.clone(), timestamp, input, output, session, request, rest, failed: 0 })
    }

    fn tokens(&self, row: &StringRecord, column: usize) -> Result<u64, RowFault> {
        let (text, name) = (field(row, column), &self.setup.header[column]);
        let number = text.parse::<f64>().ok().filter(|v| v.fract() == 0.0 && v.abs() < 9e15);
        #[expect(clippy::cast_possible_truncation, reason = "checked to be whole and small")]
        let whole = number.map(|v| v as i64).ok_or_else(|| {
            RowFault::parse(format!("{name} {text:?} is not a whole number"), "fix or remove the row")
        })?;
        length(whole, name, &self.setup.limits)
    }

    fn extra(&self, row: &StringRecord) -> Option<Box<Extra>> {
        let named =
            |column: Option<usize>| column.map(|c| field(row, c).to_string()).filter(|text| !text.is_empty());
        let mut extra =
            Extra { request_id: named(self.request), session_id: named(self.session), ..Extra::default() };
        for &column in &self.rest {
            let name = self.setup.header[column].clone();
            extra.unknown.insert(name, field(row, column).into());
        }
        (extra != Extra::default()).then(|| Box::new(extra))
    }
}

fn field(row: &StringRecord, column: usize) -> &str {
    row.get(column).unwrap_or_default()
}

impl Parse for CsvDialect {
    fn parse(&mut self, row: &Row<'_>, out: &mut Vec<Record>) -> Result<(), RowFault> {
        let Row::Csv(row) = row else {
            return Err(RowFault::parse("a JSON row in a CSV dialect", "name the dialect"));
        };
        let output_length = self.tokens(row, self.output)?;
        if output_length == 0 && self.setup.dialect == Dialect::BurstGptCsv {
            self.failed += 1;
            return Ok(());
        }
        let time = field(row, self.timestamp);
        let stamp = time.parse().map_or_else(|_| Stamp::Text(time.to_string()), Stamp::Number);
        out.push(Record {
            timestamp_ms: stamp_ms(&stamp, self.setup.unit)?,
            input_length: self.tokens(row, self.input)?,
            output_length,
            hash_ids: Vec::new(),
            extra: self.extra(row),
        });
        Ok(())
    }

    fn notes(&self) -> Vec<String> {
        if self.failed == 0 {
            return Vec::new();
        }
        vec![format!("{} failed requests (0 response tokens) were left out", self.failed)]
    }
}
