//! One server: its connection, and whether it is left out.

use std::time::{Duration, Instant};

use super::{ClusterConfig, Trouble};
use crate::resp::client::{Client, Reply, Url, is_silence};

/// A server is left out no longer than this at a time.
const EXCLUDE_MAX: Duration = Duration::from_secs(30);

/// See the module.
#[derive(Debug)]
pub(super) struct Member {
    url: Url,
    connection: Option<Client>,
    /// Until when it is left out, and for how long it was this time.
    excluded: Option<(Instant, Duration)>,
}

impl Member {
    pub(super) fn new(url: Url) -> Self {
        Self { url, connection: None, excluded: None }
    }

    pub(super) fn address(&self) -> &str {
        &self.url.address
    }

    pub(super) fn is_excluded(&self) -> bool {
        self.excluded.is_some_and(|(until, _)| Instant::now() < until)
    }

    /// Asks the server. One that does not answer is left out for a while; meanwhile it is not asked at all.
    pub(super) fn ask(&mut self, config: &ClusterConfig, command: &[&[u8]]) -> Result<Reply, Trouble> {
        if self.is_excluded() {
            return Err(Trouble::Gone(format!("{} did not answer a moment ago", self.url.address)));
        }
        let kept = self.connection.is_some();
        let mut answer = self.try_ask(config, command);
        if kept && matches!(answer, Err(Lost::Closed(_))) {
            // The server was started again since: it gets one more chance, on a new connection.
            answer = self.try_ask(config, command);
        }
        match answer {
            Ok(Reply::Error(words)) => {
                self.excluded = None;
                Err(Trouble::Refused(words))
            }
            Ok(reply) => {
                self.excluded = None;
                Ok(reply)
            }
            Err(Lost::Refused(words)) => Err(Trouble::Refused(words)),
            Err(Lost::Closed(words) | Lost::Silent(words)) => {
                let time = self.excluded.map_or(config.exclude, |(_, time)| (2 * time).min(EXCLUDE_MAX));
                self.excluded = Some((Instant::now() + time, time));
                Err(Trouble::Gone(words))
            }
        }
    }

    fn try_ask(&mut self, config: &ClusterConfig, command: &[&[u8]]) -> Result<Reply, Lost> {
        let mut client = match self.connection.take() {
            Some(client) => client,
            None => self.watched(config)?,
        };
        client.queue(command);
        let reply = client.flush().and_then(|()| client.receive()).map_err(|e| {
            let words = format!("{}: {e}", self.url.address);
            if is_silence(&e) {
                Lost::Silent(format!("{words}; is it stopped or overloaded?"))
            } else {
                Lost::Closed(words)
            }
        })?;
        self.connection = Some(client);
        Ok(reply)
    }

    /// A connection on which a silent server is asked, on another, whether it answers anything at all.
    fn watched(&self, config: &ClusterConfig) -> Result<Client, Lost> {
        let silence = config.silence;
        let mut client = Client::connect(&self.url, silence).map_err(|words| {
            // What it says about a password is an answer.
            if words.starts_with("connect") || words.starts_with("call") {
                Lost::Closed(words)
            } else {
                Lost::Refused(words)
            }
        })?;
        let url = self.url.clone();
        client.watch(config.patience, move || {
            Client::connect(&url, silence).and_then(|mut client| client.call(&[b"PING"])).is_ok()
        });
        Ok(client)
    }
}

/// Why there is no answer.
enum Lost {
    /// The connection is gone, or there never was one.
    Closed(String),
    /// Nothing comes.
    Silent(String),
    /// The server does not let us in.
    Refused(String),
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    const VALUE_BYTES: usize = 32 << 20;

    /// Takes a SET and sends half of a value for a GET, each with a rest in its middle that is longer than a silence.
    fn slow(mut stream: TcpStream, rest: Duration) -> std::io::Result<()> {
        let mut first = [0; 1];
        stream.read_exact(&mut first)?;
        std::thread::sleep(rest);
        let mut left = vec![0; b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$33554432\r\n\r\n".len() - 1 + VALUE_BYTES];
        stream.read_exact(&mut left)?;
        stream.write_all(b"+OK\r\n")?;
        let mut get = [0; b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n".len()];
        stream.read_exact(&mut get)?;
        stream.write_all(b"$4\r\nva")?;
        std::thread::sleep(rest);
        stream.write_all(b"lu\r\n")
    }

    fn ask(answers_pings: bool, rest: Duration) -> [Result<Reply, Trouble>; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let url = format!("redis://{}", listener.local_addr().expect("bound"));
        std::thread::spawn(move || {
            let mut met = listener.incoming().map_while(Result::ok);
            let first = met.next().expect("the member connects");
            std::thread::spawn(move || slow(first, rest));
            let mut kept = Vec::new();
            for mut ping in met {
                if answers_pings {
                    ping.write_all(b"+PONG\r\n").expect("it listens");
                }
                kept.push(ping);
            }
        });
        let config = ClusterConfig::of(&url).expect("one server");
        let mut member = Member::new(config.servers[0].clone());
        let put = member.ask(&config, &[b"SET", b"a", &vec![7; VALUE_BYTES]]);
        [put, member.ask(&config, &[b"GET", b"a"])]
    }

    #[test]
    fn a_server_that_rests_in_the_middle_is_waited_for_while_it_answers_pings() {
        let [put, got] = ask(true, Duration::from_millis(1_200));
        assert_eq!((put, got), (Ok(Reply::Simple("OK".into())), Ok(Reply::Bulk(b"valu".to_vec()))));
    }

    #[test]
    fn one_that_does_not_is_left_out() {
        let [put, got] = ask(false, Duration::from_secs(20));
        assert!(
            matches!(&put, Err(Trouble::Gone(words)) if words.contains("stopped or overloaded")),
            "{put:?}"
        );
        assert!(matches!(&got, Err(Trouble::Gone(words)) if words.contains("a moment ago")), "{got:?}");
    }
}
