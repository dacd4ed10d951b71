//! Small traces in the Mooncake dialect: one JSON object a line, block ids of 512 tokens each.

use std::fmt::Write as _;

/// Tokens in a block of the trace.
pub const BLOCK_TOKENS: u64 = 512;

/// One request.
#[derive(Debug, Clone)]
pub struct Row {
    /// Arrival, ms.
    pub at_ms: u64,
    /// Prompt length.
    pub input_tokens: u64,
    /// Answer length.
    pub output_tokens: u64,
    /// Ids of its blocks.
    pub blocks: Vec<u64>,
}

impl Row {
    /// A request whose prompt fills `blocks` to the last token.
    pub fn full(at_ms: u64, output_tokens: u64, blocks: impl IntoIterator<Item = u64>) -> Self {
        let blocks: Vec<u64> = blocks.into_iter().collect();
        Self { at_ms, input_tokens: blocks.len() as u64 * BLOCK_TOKENS, output_tokens, blocks }
    }

    fn line(&self) -> String {
        format!(
            r#"{{"timestamp": {}, "input_length": {}, "output_length": {}, "hash_ids": {:?}}}"#,
            self.at_ms, self.input_tokens, self.output_tokens, self.blocks
        )
    }
}

/// The text of a trace.
pub fn text(rows: &[Row]) -> String {
    rows.iter().fold(String::new(), |mut text, row| {
        writeln!(text, "{}", row.line()).unwrap();
        text
    })
}

/// Five requests far apart, no block shared: any cluster serves them in time.
pub fn easy() -> Vec<Row> {
    (0..5).map(|i| Row::full(i * 20_000, 10, 10 * i + 1..10 * i + 4)).collect()
}

/// Far more at once than a cluster of a few dozen nodes can prefill within half a minute.
pub fn flood() -> Vec<Row> {
    (0..600).map(|i| Row::full(4 * i, 50, 1_000 * i + 1..1_000 * i + 201)).collect()
}

/// `count` requests over a growing tree of shared prefixes, the same on every call.
pub fn tree(count: u64) -> Vec<Row> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut draw = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let (mut rows, mut fresh): (Vec<Row>, u64) = (Vec::new(), 1);
    for i in 0..count {
        let mut blocks = Vec::new();
        if !rows.is_empty() && draw(4) > 0 {
            let earlier: &Row = &rows[draw(i) as usize];
            // A last block may be partial, so no chain continues behind it.
            let shared = draw(earlier.blocks.len() as u64) as usize;
            blocks.extend_from_slice(&earlier.blocks[..shared]);
        }
        let more = 1 + draw(6);
        blocks.extend(fresh..fresh + more);
        fresh += more;
        let input_tokens = blocks.len() as u64 * BLOCK_TOKENS - draw(BLOCK_TOKENS);
        rows.push(Row { at_ms: i * 700, input_tokens, output_tokens: 1 + draw(40), blocks });
    }
    rows
}
