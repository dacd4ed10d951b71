//! A text and a chat whose tokens tell one tokenizer from another.

use super::Tokenization;
use crate::chat::{Chat, Message};

/// Scripts, digits, signs, spaces and line ends: what tokenizers cut each in their own way.
const TEXT: &str = "The quick brown fox jumps over 1234567890 + 3.14159 lazy dogs.\n\tfn main() { println!(\"hi\"); }\n\n  \
    Über straße, naïve café; Привет, 你好，世界。こんにちは 🙂 don't  DON'T ";
/// A turn of each party, which every template takes, in spaces, which some templates take away.
const MESSAGES: &str = r#"[{"role":"user","content":" How many blocks are 4,096 tokens?\n"},{"role":"assistant","content":"\nAt 16 tokens a block: 256. "},{"role":"user","content":"Danke! 谢谢 🙂"}]"#;
/// Special tokens in the text at most.
const MARKS: usize = 4;

/// A text and a chat with the tokens that they have here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// A text, special tokens of this vocabulary among it.
    pub text: String,
    /// Its tokens, with those that the tokenizer puts around a text.
    pub tokens: Vec<u32>,
    /// `messages` of a chat, as JSON.
    pub messages: &'static str,
    /// The chat's tokens, where it reads alike at any time.
    pub chat_tokens: Option<Vec<u32>>,
}

impl Tokenization {
    /// A sample that distinguishes this tokenizer, and its chat template, from another.
    ///
    /// # Errors
    /// When it cannot tokenise its own sample.
    pub fn sample(&self) -> Result<Sample, String> {
        let mut text = TEXT.to_owned();
        for mark in self.marks() {
            text.push_str(&mark);
            text.push_str("and ");
        }
        let (before, after) = self.affixes(true);
        let tokens = [before, &self.encode_part(&text)?, after].concat();
        let chat_tokens = self.sample_chat().map(|text| self.encode_part(&text)).transpose()?;
        Ok(Sample { text, tokens, messages: MESSAGES, chat_tokens })
    }

    /// The names of the first special tokens that have one.
    fn marks(&self) -> Vec<String> {
        let special = (0..self.vocab_tokens()).filter(|&token| self.table.is_special(token));
        let named = special.filter_map(|token| std::str::from_utf8(self.table.bytes(token)).ok());
        named.filter(|name| !name.trim().is_empty()).take(MARKS).map(str::to_owned).collect()
    }

    /// The chat, unless the template refuses it, is none, or writes the time into it.
    fn sample_chat(&self) -> Option<String> {
        if self.uses_time() {
            return None;
        }
        let messages: Vec<Message<'_>> = serde_json::from_str(MESSAGES).ok()?;
        self.render(&Chat::plain(&messages)).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_the_same_each_time_and_has_special_tokens_in_it() {
        let sample = Tokenization::bytes().sample().unwrap();
        assert_eq!(sample, Tokenization::bytes().sample().unwrap());
        assert_eq!(sample.tokens.first(), Some(&256), "what comes around a text is there");
        for mark in ["<|begin|>", "<|im_start|>"] {
            assert!(sample.text.contains(mark), "{}", sample.text);
        }
        assert!(sample.tokens.contains(&258) && sample.tokens.len() < 400);
        let chat = sample.chat_tokens.unwrap();
        assert_eq!(chat[..2], [256, 258], "the template is in it");
    }
}
