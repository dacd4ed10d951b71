//! Sampling settings on the wire.

use baton_types::Sampling;

use crate::v1;

impl From<&Sampling> for v1::Sampling {
    fn from(settings: &Sampling) -> Self {
        let (bias_tokens, biases) = settings.logit_bias.iter().copied().unzip();
        Self {
            temperature: settings.temperature,
            top_p: settings.top_p,
            top_k: settings.top_k,
            min_p: settings.min_p,
            presence_penalty: settings.presence_penalty,
            frequency_penalty: settings.frequency_penalty,
            repetition_penalty: settings.repetition_penalty,
            bias_tokens,
            biases,
            seed: settings.seed,
            max_tokens: settings.max_tokens,
            min_tokens: settings.min_tokens,
            stop_tokens: settings.stop_token_ids.clone(),
            ignore_eos: settings.ignore_eos,
            logprobs: settings.logprobs.map(u32::from),
            prompt_logprobs: settings.prompt_logprobs.map(u32::from),
        }
    }
}

impl v1::Sampling {
    /// The settings; `None` where a number is none or out of its range, or a bias has no token.
    #[must_use]
    pub fn read(&self) -> Option<Sampling> {
        let count = |most: Option<u32>| most.map(u8::try_from).transpose().ok();
        let numbers = [self.temperature, self.top_p, self.min_p, self.presence_penalty];
        let mut numbers =
            numbers.iter().chain([&self.frequency_penalty, &self.repetition_penalty]).chain(&self.biases);
        if self.bias_tokens.len() != self.biases.len() || !numbers.all(|number| number.is_finite()) {
            return None;
        }
        Some(Sampling {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            repetition_penalty: self.repetition_penalty,
            logit_bias: self.bias_tokens.iter().copied().zip(self.biases.iter().copied()).collect(),
            seed: self.seed,
            max_tokens: self.max_tokens,
            min_tokens: self.min_tokens,
            stop_token_ids: self.stop_tokens.clone(),
            ignore_eos: self.ignore_eos,
            logprobs: count(self.logprobs)?,
            prompt_logprobs: count(self.prompt_logprobs)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Sampling {
        Sampling {
            temperature: 0.7,
            top_p: 0.9,
            top_k: 40,
            min_p: 0.05,
            presence_penalty: -0.5,
            frequency_penalty: 0.25,
            repetition_penalty: 1.1,
            logit_bias: vec![(3, -100.0), (70_000, 2.5)],
            seed: u64::MAX,
            max_tokens: 512,
            min_tokens: 4,
            stop_token_ids: vec![2, 70_001],
            ignore_eos: true,
            logprobs: Some(20),
            prompt_logprobs: Some(0),
        }
    }

    #[test]
    fn settings_survive_the_wire() {
        for settings in [settings(), Sampling::default()] {
            assert_eq!(v1::Sampling::from(&settings).read(), Some(settings));
        }
    }

    #[test]
    fn settings_that_make_no_sense_are_none() {
        let sent = v1::Sampling::from(&settings());
        assert_eq!(v1::Sampling { logprobs: Some(256), ..sent.clone() }.read(), None);
        assert_eq!(v1::Sampling { prompt_logprobs: Some(u32::MAX), ..sent.clone() }.read(), None);
        assert_eq!(v1::Sampling { biases: vec![1.0], ..sent.clone() }.read(), None, "a bias for each token");
        assert_eq!(v1::Sampling { biases: vec![1.0, f32::INFINITY], ..sent.clone() }.read(), None);
        assert_eq!(v1::Sampling { temperature: f32::NAN, ..sent }.read(), None);
    }
}
