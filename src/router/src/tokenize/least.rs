//! How few tokens a text can be, by its length alone: what can never fit is refused before it is tokenised.

use tokenizers::models::ModelWrapper;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::{AddedToken, Tokenizer};

use super::table::TokenTable;

/// NFC makes a text at most this many times shorter, in bytes of UTF-8. The most that a character composes of is three
/// times as long (three Hangul letters, one syllable), a little more where a letter in it has a longer twin (U+1FBE).
const NFC_SHORTENS: usize = 4;

/// Bytes of text that a token stands for at most. `None` where a token may stand for any number of them, or where it is
/// not known.
pub(crate) fn longest_token_bytes(
    tokenizer: &Tokenizer,
    table: &TokenTable,
    bytes: &[char],
) -> Option<usize> {
    let shortens = shortens(tokenizer.get_normalizer())?;
    let keeps = tokenizer.get_pre_tokenizer().is_some_and(keeps_text);
    // A byte without a token would be left out of the prompt.
    let knows_bytes = bytes.iter().all(|byte| tokenizer.token_to_id(byte.encode_utf8(&mut [0; 4])).is_some());
    let merges = matches!(tokenizer.get_model(), ModelWrapper::BPE(_));
    // Such a token takes the white space beside it along, however much there is.
    let takes_space = |token: &AddedToken| token.lstrip || token.rstrip;
    let plain = !tokenizer.get_added_tokens_decoder().values().any(takes_space);
    (keeps && knows_bytes && merges && plain).then(|| table.longest().max(1) * shortens)
}

/// How many times shorter a text may be once it is normalised.
fn shortens(normalizer: Option<&NormalizerWrapper>) -> Option<usize> {
    match normalizer {
        None => Some(1),
        Some(NormalizerWrapper::NFC(_)) => Some(NFC_SHORTENS),
        Some(NormalizerWrapper::Sequence(all)) => {
            // Normalising twice shortens a text no further than normalising it once.
            let each: Option<Vec<usize>> = all.as_ref().iter().map(|one| shortens(Some(one))).collect();
            Some(each?.into_iter().max().unwrap_or(1))
        }
        Some(_) => None,
    }
}

/// Whether what is cut is cut into byte letters, with nothing left out.
fn keeps_text(cutter: &PreTokenizerWrapper) -> bool {
    let keeps = |one: &PreTokenizerWrapper| match one {
        PreTokenizerWrapper::ByteLevel(_) | PreTokenizerWrapper::Digits(_) => true,
        PreTokenizerWrapper::Split(split) => !matches!(split.behavior, SplitDelimiterBehavior::Removed),
        _ => false,
    };
    let letters = |one: &PreTokenizerWrapper| matches!(one, PreTokenizerWrapper::ByteLevel(_));
    match cutter {
        PreTokenizerWrapper::Sequence(all) => {
            all.as_ref().iter().all(keeps) && all.as_ref().iter().any(letters)
        }
        one => letters(one),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const LETTERS: [char; 3] = ['a', 'b', 'Ġ'];

    fn made(change: impl FnOnce(&mut Value)) -> Option<usize> {
        let mut tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
            "added_tokens": [{"id": 4, "content": "<long>", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true}],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                "vocab": {"a": 0, "b": 1, "Ġ": 2, "ab": 3}, "merges": [["a", "b"]]}
        });
        change(&mut tokenizer);
        let tokenizer = Tokenizer::from_bytes(tokenizer.to_string()).unwrap();
        let entries = ["a", "b", " ", "ab", "<long>"].map(|text| (text.as_bytes().into(), false));
        longest_token_bytes(&tokenizer, &TokenTable::new(entries.into_iter()), &LETTERS)
    }

    #[test]
    fn a_token_is_as_long_as_the_longest_where_no_text_gets_lost() {
        assert_eq!(made(|_| ()), Some(6));
        assert_eq!(made(|it| it["normalizer"] = json!({"type": "NFC"})), Some(24));
        let cut = |behavior: &str| {
            let split =
                json!({"type": "Split", "pattern": {"Regex": "\\s+"}, "behavior": behavior, "invert": false});
            let letters = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
            made(|it| it["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [split, letters]}))
        };
        assert_eq!((cut("Isolated"), cut("Removed")), (Some(6), None));
    }

    #[test]
    fn where_a_token_may_stand_for_any_text_there_is_no_bound() {
        assert_eq!(made(|it| it["normalizer"] = json!({"type": "StripAccents"})), None);
        assert_eq!(
            made(|it| it["normalizer"] =
                json!({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]})),
            None
        );
        assert_eq!(made(|it| it["pre_tokenizer"] = json!({"type": "Whitespace"})), None);
        assert_eq!(made(|it| it["pre_tokenizer"] = Value::Null), None);
        assert_eq!(made(|it| it["added_tokens"][0]["rstrip"] = json!(true)), None);
        assert_eq!(made(|it| it["model"]["vocab"] = json!({"a": 0, "b": 1, "ab": 3})), None, "no space");
    }
}
