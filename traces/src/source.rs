//! Bytes of a trace file as rows: plain or gzip, lines or CSV, every row bounded in size.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use flate2::read::MultiGzDecoder;

use crate::error::{RowFault, Stage, TraceError};

/// Bytes looked at to tell the dialect and what it leaves open.
const SAMPLE_BYTES: usize = 1 << 20;
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// How far reading has come, for a progress bar. Counts bytes of the file as it lies on disk.
#[derive(Debug, Clone, Default)]
pub struct Progress {
    read: Arc<AtomicU64>,
    total: u64,
}

impl Progress {
    /// Bytes taken from the file so far.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Size of the file; 0 for a pipe.
    #[must_use]
    pub fn bytes_total(&self) -> u64 {
        self.total
    }
}

struct CountingReader<R> {
    inner: R,
    read: Arc<AtomicU64>,
}

impl<R: Read> Read for CountingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.read.fetch_add(n as u64, Ordering::Relaxed);
        Ok(n)
    }
}

/// An opened file whose first bytes have been looked at but not consumed.
pub(crate) struct OpenedTrace {
    pub(crate) path: PathBuf,
    pub(crate) progress: Progress,
    /// The file from its first byte, decompressed.
    pub(crate) bytes: Box<dyn BufRead + Send>,
    /// The leading bytes; whole lines unless the file is shorter or its first line longer.
    pub(crate) sample: Vec<u8>,
    /// Whether the sample is the whole file.
    pub(crate) whole: bool,
}

/// Opens `path`, gunzipping where its first bytes say so, and takes a sample.
pub(crate) fn open(path: &Path, row_bytes: u64) -> Result<OpenedTrace, TraceError> {
    let fault =
        |problem: String, remedy: &str| RowFault::new(Stage::Open, "open", problem, remedy).at(path, None);
    let file = File::open(path).map_err(|e| fault(e.to_string(), "check the path"))?;
    let meta = file.metadata().map_err(|e| fault(e.to_string(), "check the path"))?;
    if meta.is_dir() {
        return Err(fault("is a directory".into(), "name one file"));
    }
    let progress = Progress { read: Arc::default(), total: if meta.is_file() { meta.len() } else { 0 } };
    let mut raw =
        BufReader::with_capacity(1 << 16, CountingReader { inner: file, read: Arc::clone(&progress.read) });
    let head = raw.fill_buf().map_err(|e| fault(e.to_string(), "check the file"))?;
    let mut bytes: Box<dyn BufRead + Send> = if head.starts_with(&GZIP_MAGIC) {
        Box::new(BufReader::with_capacity(1 << 16, MultiGzDecoder::new(raw)))
    } else {
        Box::new(raw)
    };
    let (sample, whole) = take_sample(&mut bytes, row_bytes)
        .map_err(|e| fault(e.to_string(), "the file is cut short or damaged; fetch it again"))?;
    Ok(OpenedTrace {
        path: path.to_path_buf(),
        progress,
        bytes: Box::new(Cursor::new(sample.clone()).chain(bytes)),
        sample,
        whole,
    })
}

/// Reads until the sample is full and holds at least one whole line, or the row bound is reached.
fn take_sample(bytes: &mut dyn BufRead, row_bytes: u64) -> io::Result<(Vec<u8>, bool)> {
    let mut sample = Vec::new();
    loop {
        let before = sample.len();
        bytes.take(1 << 16).read_to_end(&mut sample)?;
        if sample.len() == before {
            return Ok((sample, true));
        }
        let has_line = sample[before..].contains(&b'\n') || sample[..before].contains(&b'\n');
        if (sample.len() >= SAMPLE_BYTES && has_line) || sample.len() as u64 > row_bytes {
            return Ok((sample, false));
        }
    }
}

/// Lines of a file, numbered from 1, blank ones skipped.
pub(crate) struct Lines {
    bytes: Box<dyn BufRead + Send>,
    buffer: Vec<u8>,
    number: u64,
    row_bytes: u64,
}

impl Lines {
    pub(crate) fn new(bytes: Box<dyn BufRead + Send>, row_bytes: u64) -> Self {
        Self { bytes, buffer: Vec::new(), number: 0, row_bytes }
    }

    /// Number of the line that was last returned or refused.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// The next line that is not blank, without its line ending; `None` at the end.
    pub(crate) fn next_line(&mut self) -> Result<Option<&[u8]>, RowFault> {
        loop {
            self.buffer.clear();
            self.number += 1;
            let limit = self.row_bytes + 1;
            let n = self
                .bytes
                .by_ref()
                .take(limit)
                .read_until(b'\n', &mut self.buffer)
                .map_err(|e| read_fault(&e))?;
            if n == 0 {
                return Ok(None);
            }
            if n as u64 == limit && self.buffer.last() != Some(&b'\n') {
                return Err(too_long(self.row_bytes));
            }
            if self.number == 1 && self.buffer.starts_with(b"\xef\xbb\xbf") {
                self.buffer.drain(..3);
            }
            let trimmed = self.buffer.trim_ascii_end().len();
            self.buffer.truncate(trimmed);
            if !self.buffer.trim_ascii_start().is_empty() {
                return Ok(Some(&self.buffer));
            }
        }
    }
}

fn read_fault(error: &io::Error) -> RowFault {
    RowFault::new(
        Stage::Open,
        "open",
        format!("reading failed: {error}"),
        "the file is cut short or damaged; fetch it again",
    )
}

fn too_long(row_bytes: u64) -> RowFault {
    RowFault::bound(
        format!("the row is longer than {row_bytes} bytes"),
        "check that the file has one row a line; raise the row bound if it really is that long",
    )
}

/// Refuses to hand out more than a row's worth of bytes between two resets, so that a quote that
/// is never closed cannot pull the rest of the file into memory.
struct RowBudget {
    bytes: Box<dyn BufRead + Send>,
    left: Arc<AtomicU64>,
}

impl Read for RowBudget {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.left.load(Ordering::Relaxed);
        if left == 0 {
            return Err(io::Error::other("row too long"));
        }
        let most = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let n = self.bytes.read(&mut buffer[..most])?;
        self.left.fetch_sub(n as u64, Ordering::Relaxed);
        Ok(n)
    }
}

/// Records of a CSV file under its header.
pub(crate) struct CsvRows {
    reader: csv::Reader<RowBudget>,
    record: csv::StringRecord,
    header: Vec<String>,
    left: Arc<AtomicU64>,
    row_bytes: u64,
    number: u64,
    dead: bool,
}

impl CsvRows {
    pub(crate) fn new(bytes: Box<dyn BufRead + Send>, row_bytes: u64) -> Result<Self, RowFault> {
        let left = Arc::new(AtomicU64::new(row_bytes.max(1 << 13)));
        let budget = RowBudget { bytes, left: Arc::clone(&left) };
        let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).flexible(false).from_reader(budget);
        let header = reader
            .headers()
            .map_err(|e| csv_fault(&e, row_bytes))?
            .iter()
            .map(|name| name.trim_start_matches('\u{feff}').to_string())
            .collect();
        Ok(Self { reader, record: csv::StringRecord::new(), header, left, row_bytes, number: 1, dead: false })
    }

    pub(crate) fn header(&self) -> &[String] {
        &self.header
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// The next record; `None` at the end.
    pub(crate) fn next_record(&mut self) -> Result<Option<&csv::StringRecord>, RowFault> {
        if self.dead {
            return Ok(None);
        }
        self.left.store(self.row_bytes.max(1 << 13), Ordering::Relaxed);
        let outcome = self.reader.read_record(&mut self.record);
        if let Some(position) = self.record.position() {
            self.number = position.line();
        }
        match outcome {
            Ok(true) => Ok(Some(&self.record)),
            Ok(false) => Ok(None),
            Err(error) => {
                if let Some(position) = error.position() {
                    self.number = position.line();
                }
                self.dead = error.is_io_error();
                Err(csv_fault(&error, self.row_bytes))
            }
        }
    }
}

fn csv_fault(error: &csv::Error, row_bytes: u64) -> RowFault {
    match error.kind() {
        csv::ErrorKind::Io(e) if e.to_string() == "row too long" => too_long(row_bytes),
        csv::ErrorKind::Io(e) => read_fault(e),
        csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
            RowFault::parse(format!("{len} fields under a header of {expected_len}"), "fix or remove the row")
        }
        _ => RowFault::parse(error.to_string(), "save the file as UTF-8 CSV"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &'static [u8], row_bytes: u64) -> Lines {
        Lines::new(Box::new(Cursor::new(text)), row_bytes)
    }

    #[test]
    fn lines_are_numbered_as_in_an_editor_and_blank_ones_skipped() {
        let mut lines = lines(b"\xef\xbb\xbfa\r\n\n  \nb", 100);
        assert_eq!(lines.next_line().unwrap(), Some(&b"a"[..]));
        assert_eq!(lines.next_line().unwrap(), Some(&b"b"[..]));
        assert_eq!(lines.number(), 4);
        assert_eq!(lines.next_line().unwrap(), None);
    }

    #[test]
    fn a_line_over_the_bound_is_refused_and_one_at_the_bound_is_not() {
        assert!(lines(b"12345\n", 5).next_line().is_ok());
        let fault = lines(b"123456\n", 5).next_line().unwrap_err();
        assert_eq!(fault.stage, Stage::Bound);
    }

    #[test]
    fn an_open_quote_does_not_swallow_the_file() {
        let mut text = b"a,b\n1,\"".to_vec();
        text.resize(1 << 20, b'x');
        let mut rows = CsvRows::new(Box::new(Cursor::new(text)), 10_000).unwrap();
        assert_eq!(rows.next_record().unwrap_err().stage, Stage::Bound);
        assert!(rows.next_record().unwrap().is_none());
    }

    #[test]
    fn csv_rows_of_the_wrong_width_name_their_line() {
        let text = b"a,b\n1,2\n3\n4,5\n".to_vec();
        let mut rows = CsvRows::new(Box::new(Cursor::new(text)), 10_000).unwrap();
        assert!(rows.next_record().unwrap().is_some());
        assert!(rows.next_record().is_err());
        assert_eq!(rows.number(), 3);
        assert!(rows.next_record().unwrap().is_some());
    }
}
