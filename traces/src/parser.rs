//! The contract of a dialect's parser: its input and its duty.

use std::collections::HashMap;

use crate::dialect::Dialect;
use crate::dialect::{applied, bailian, csv_rows, dynamo, mooncake, otel, sagemaker, tracelab, turns, weka};
use crate::error::RowFault;
use crate::options::{Columns, Limits, TimeUnit};
use crate::prompt::mix_bytes;
use crate::record::Record;

/// One row as the file has it.
pub(crate) enum Row<'a> {
    Json(&'a [u8]),
    Csv(&'a csv::StringRecord),
}

impl<'a> Row<'a> {
    pub(crate) fn json(&self) -> Result<&'a [u8], RowFault> {
        match self {
            Row::Json(line) => Ok(line),
            Row::Csv(_) => Err(RowFault::parse("a CSV row in a JSON dialect", "name the dialect")),
        }
    }
}

/// Everything the options and the sample settle before the first row is parsed.
#[derive(Debug, Clone)]
pub(crate) struct Setup {
    pub(crate) dialect: Dialect,
    pub(crate) block_tokens: u32,
    /// The source gives no id to a tail shorter than a block.
    pub(crate) tails_dropped: bool,
    pub(crate) unit: TimeUnit,
    /// Times are dates: the first row is moved to 0.
    pub(crate) rebase: bool,
    pub(crate) delta: bool,
    /// Rows come in time order, or ought to.
    pub(crate) ordered: bool,
    pub(crate) columns: Columns,
    pub(crate) limits: Limits,
    /// Header of a CSV file.
    pub(crate) header: Vec<String>,
}

/// Turns rows into records. Ids may be missing, and may leave out a tail; the reader settles that.
pub(crate) trait Parse: Send {
    /// Appends the records of one row, times as absolute as the row has them.
    fn parse(&mut self, row: &Row<'_>, out: &mut Vec<Record>) -> Result<(), RowFault>;

    /// Notes about skipped rows and about assumptions, for the assumptions at the end.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }
}

/// The parser of a dialect.
pub(crate) fn parser(setup: &Setup) -> Result<Box<dyn Parse>, RowFault> {
    Ok(match setup.dialect {
        Dialect::Mooncake | Dialect::MooncakeDelta | Dialect::AgenticMooncake => {
            Box::new(mooncake::Mooncake::new(setup))
        }
        Dialect::DynamoRequest => Box::new(dynamo::DynamoRequest::new(setup)),
        Dialect::AppliedComputeAgentic => Box::new(applied::AppliedDialect::new(setup)),
        Dialect::Weka => Box::new(weka::Weka::new(setup)),
        Dialect::Otel => Box::new(otel::Otel::new(setup)),
        Dialect::Bailian => Box::new(bailian::Bailian::new(setup)),
        Dialect::MultiTurn => Box::new(turns::Turns::new(setup)),
        Dialect::TraceLab => Box::new(tracelab::TraceLab::new(setup)),
        Dialect::SagemakerCapture => Box::new(sagemaker::Sagemaker::new(setup)),
        Dialect::AzureCsv | Dialect::BurstGptCsv | Dialect::SplitwiseCsv | Dialect::VidurCsv => {
            Box::new(csv_rows::CsvDialect::new(setup)?)
        }
    })
}

/// State per session, bounded in number.
#[derive(Debug)]
pub(crate) struct Sessions<S> {
    by_key: HashMap<u64, S>,
    most: usize,
}

impl<S: Default> Sessions<S> {
    pub(crate) fn new(most: usize) -> Self {
        Self { by_key: HashMap::new(), most }
    }

    /// The session called `name`, made on first use.
    pub(crate) fn get(&mut self, name: &str) -> Result<&mut S, RowFault> {
        let key = session_key(name);
        if self.by_key.len() >= self.most && !self.by_key.contains_key(&key) {
            return Err(RowFault::bound(format!("more than {} sessions", self.most), "split the file"));
        }
        Ok(self.by_key.entry(key).or_default())
    }
}

/// A session's name as a number.
pub(crate) fn session_key(name: &str) -> u64 {
    mix_bytes(0x7365_7373, name.as_bytes())
}

/// A length that may have been written negative or too large.
pub(crate) fn length(value: i64, what: &str, limits: &Limits) -> Result<u64, RowFault> {
    let tokens = u64::try_from(value).map_err(|_| {
        RowFault::check("length", format!("{what} {value} is negative"), "fix or remove the row")
    })?;
    if tokens > limits.tokens {
        return Err(RowFault::bound(
            format!("{what} {tokens} is over the bound of {} tokens", limits.tokens),
            "check the column; fix or remove the row",
        ));
    }
    Ok(tokens)
}

/// A field that the dialect cannot do without.
pub(crate) fn required<T>(value: Option<T>, field: &str) -> Result<T, RowFault> {
    value.ok_or_else(|| {
        RowFault::parse(
            format!("the field {field} is missing"),
            "fix or remove the row, name the dialect, or name the column",
        )
    })
}
