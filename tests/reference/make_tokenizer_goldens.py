#!/usr/bin/env python3
"""Writes tests/golden/tokenizer/: what Hugging Face's tokenizers make of 2,000 strings, with the default model's vocabulary
under each pre-tokenizer, and what Python makes of broken UTF-8. Never needed to build or run.

    python3 -m venv venv && venv/bin/pip install tokenizers==0.23.3 gguf==0.19.0 numpy==2.4.6
    venv/bin/python tests/reference/make_tokenizer_goldens.py [MODEL.gguf]

encodings.jsonl, a line a case: [text, parse_special, ids of smollm, gpt2, llama-bpe, qwen2]. In place of ids that equal an
earlier list of the line stands that list's index, 0 for smollm. utf8_replace.jsonl: [bytes as hex, text].
"""
import json
import os
import random
import sys
import unicodedata

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
OUT = os.path.join(ROOT, "tests", "golden", "tokenizer")
MODEL = os.environ.get("LOUPE_TEST_MODEL", os.path.join(ROOT, "models", "SmolLM2-135M-Instruct.Q4_1.gguf"))
SEED = 20240229
NUM_STRINGS = 2000
CONTROL = 3  # token type in GGUF

# The expressions that the models' own tokenizer.json files carry.
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

SENTENCES = """
All human beings are born free and equal in dignity and rights.
Toutes les personnes naissent libres et égales ; l'été, ça n'était qu'un rêve à 3 €.
Alle Menschen sind frei und gleich an Würde und Rechten geboren. Straße, Übermut, Größe.
Todos los seres humanos nacen libres… ¿no? ¡Sí! El niño comió piñas en Ávila.
Tutti gli esseri umani nascono liberi; perché no? Così è più città.
Todos os seres humanos nascem livres: coração, ação, avô e avó.
Alla människor är födda fria. Åäö, ÅÄÖ.
Kaikki ihmiset syntyvät vapaina ja tasavertaisina arvoltaan ja oikeuksiltaan.
Minden emberi lény szabadon születik: őrült, űrhajó, árvíztűrő tükörfúrógép.
Wszyscy ludzie rodzą się wolni; zażółć gęślą jaźń.
Všichni lidé rodí se svobodní; příliš žluťoučký kůň úpěl ďábelské ódy.
Bütün insanlar hür doğar; İstanbul, ığdır, şeker, çağ.
Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền.
Все люди рождаются свободными и равными в своём достоинстве и правах.
Всі люди народжуються вільними; їжак, ґанок, є.
Всички хора се раждат свободни и равни по достойнство и права.
Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια. ΐ ΰ ὦ ᾳ
Բոլոր մարդիկ ծնվում են ազատ ու հավասար։
ყველა ადამიანი იბადება თავისუფალი და თანასწორი.
כל בני האדם נולדו בני חורין ושווים בערכם; שָׁלוֹם עֲלֵיכֶם.
يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق. ٱلسَّلَامُ ١٢٣٤٥
تمام افراد بشر آزاد به دنیا می‌آیند؛ ۱۲۳ کتاب‌ها.
تمام انسان آزاد اور حقوق و عزت کے اعتبار سے برابر پیدا ہوئے ہیں۔
सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता प्राप्त है। क्षि १२३
সমস্ত মানুষ স্বাধীনভাবে সমান মর্যাদা এবং অধিকার নিয়ে জন্মগ্রহণ করে। ৪৫৬
ਸਾਰਾ ਮਨੁੱਖੀ ਪਰਿਵਾਰ ਆਪਣੀ ਮਹਿਮਾ ਦੇ ਪੱਖੋਂ ਆਜ਼ਾਦ ਹੈ।
પ્રતિષ્ઠા અને અધિકારોની દૃષ્ટિએ સર્વ માનવો જન્મથી સ્વતંત્ર હોય છે.
மனிதப் பிறவியினர் சகலரும் சுதந்திரமாகவே பிறக்கின்றனர்; கொ கௌ.
ప్రతిపత్తిస్వత్వముల విషయమున మానవులెల్లరును జన్మతః స్వతంత్రులు.
ಎಲ್ಲಾ ಮಾನವರೂ ಸ್ವತಂತ್ರರಾಗಿಯೇ ಜನಿಸಿದ್ದಾರೆ. ೧೨೩
മനുഷ്യരെല്ലാവരും തുല്യാവകാശങ്ങളോടെ ജനിച്ചവരാണ്‌.
සියලු මනුෂ්‍යයෝ නිදහස්ව උපත ලබා ඇත.
มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกัน ๑๒๓
ມະນຸດທຸກຄົນເກີດມາມີກຽດສັກສີ.
လူတိုင်းသည် တူညီ လွတ်လပ်သော ဂုဏ်သိက္ခာဖြင့် မွေးဖွားလာသူများ ဖြစ်သည်။
មនុស្សទាំងអស់កើតមកមានសេរីភាព។ ៤៥
འགྲོ་བ་མིའི་རིགས་རྒྱུད་ཡོངས་ལ་སྐྱེས་ཙམ་ཉིད་ནས་ཆེ་མཐོངས་ཡོད།
የሰው ልጅ ሁሉ ሲወለድ ነጻና በክብርና በመብትም እኩልነት ያለው ነው። ፩፪፫
ᎠᏂᏴᏫ ᏂᎦᏓ ᎤᎾᏓᏅᏖᎸ; ᏣᎳᎩ.
ᐃᓄᓕᒫᑦ ᐊᓂᖅᑎᕆᔪᑦ ᓄᐃᑎᑕᐅᕙᓚᐅᕋᓗᐊᖅᑎᓪᓗᒋᑦ.
Хүн бүр төрж мэндлэхдээ эрх чөлөөтэй. ᠮᠣᠩᠭᠣᠯ
人人生而自由,在尊严和权利上一律平等。他们赋有理性和良心!(2024年3月)
人人生而自由,在尊嚴和權利上一律平等。臺灣、龜、鬱。
すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。カタカナ ﾊﾝｶｸ
모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. ㅋㅋㅋ 한글
𐍅𐌿𐌻𐍆𐌹𐌻𐌰 𐤀𐤁𐤂 𒀀𒁀 𓀀𓂀 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟘𝟙𝟚 𠀀𠮷 𞤀𞤣𞤤𞤢𞤥
""".strip().splitlines()

CODE = r"""
int main(int argc, char** argv) {\n\tfor (size_t i = 0; i < 10; ++i) printf("%d\\n", i);\n\treturn 0;\n}
def f(x: int) -> str:\n    return f"{x!r:>10}"  # comment\n\n\nclass A:\n    pass\n
SELECT a.id, COUNT(*) FROM t1 AS a LEFT JOIN t2 b ON a.id=b.a_id WHERE x >= 3.14e-10 GROUP BY 1;
<div class="a b">\r\n  <a href='https://example.com/?q=1&r=%20'>x</a>\r\n</div>
{"key": [1, 2.5, -3e10, null, true], "s": "\u00e9\n"}
#!/bin/sh\nset -eu\nfor f in *.txt; do cat "$f" | grep -v '^#' >> /tmp/out || exit 1; done
let v: Vec<&'static str> = vec!["a"; 3]; // don't\nmatch x { Some(y) if y > 0 => y, _ => 0 }
\\begin{equation} \\sum_{i=1}^{n} x_i^2 \\le \\frac{1}{2} \\end{equation}
--- a/x\n+++ b/x\n@@ -1,3 +1,4 @@\n-old\n+new\n+    more\n
192.168.0.1:8080 user@example.org C:\\Users\\me\\file.txt ~/.config/x 0xDEADBEEF 1_000_000
| a | b |\n|---|:-:|\n| 1 | **2** |\n\n* item\n  * nested\n\n```js\nx => x ?? y?.z;\n```
if (a&&b||!c) { a+=1; b-=1; c<<=2; d>>>=1; e**=2; } /* ===== */ //////
""".strip().splitlines()

EMOJI = ["😀", "👍🏽", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇫🇷🇯🇵", "1️⃣", "❤️", "✨", "🧑🏿‍🚀", "©️", "🤷‍♀️", "☃", "♞", "🏴󠁧󠁢󠁳󠁣󠁴󠁿", "™", "∑∫√∞≠", "→⇒↔", "①②Ⅷ½¾", "①", "x²", "㊙"]
SPACES = [" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u2003", "\u2028", "\u3000", "\u0085", "\x0b", "\x0c", "\u200b", "\ufeff",
          "\u202f", "\n\n", " \n ", "\r", "\u1680", "\u205f", "\x1c", "\u180e"]
CONTRACTIONS = ["don't", "I'LL", "we've", "SHE'S", "they'd", "it's", "'s", "''s", "'tis", "I'm", "I'M", "you're", "YOU'RE",
                "o'clock", "'\u017f", "'\u017fx", "'S9", "a'b", "'vE", "'lL!", "’s", "rock'n'roll", "'d3", "'", "'r", "'l", "'re"]
MARKS = ["e\u0301", "\u0301", "a\u0323\u0307", "a\u0307\u0323", "\u1100\u1161\u11a8", "\u0344", "\u212b", "\ufb01", "q\u0307\u0323",
         "\u0f73", "\u09c7\u09be", "Z\u0351\u0337\u0310", "\u0958", "\ufb1d", "\u2126", "\u1e9b\u0323", "\uf900", "\u0340"]
WORDS = "the of and a to in is you that it he was for on are as with his they I at be this have from or one had by word".split()


def load():
    reader = gguf.GGUFReader(sys.argv[1] if len(sys.argv) > 1 else MODEL)
    field = lambda name: reader.fields["tokenizer.ggml." + name].contents()
    tokens, types = field("tokens"), field("token_type")
    merges = [tuple(m.split(" ")) for m in field("merges")]
    return tokens, [t for t, kind in zip(tokens, types) if kind == CONTROL], merges


def make(name, tokens, control, merges):
    vocab = {t: i for i, t in enumerate(tokens)}
    tok = Tokenizer(models.BPE(vocab, merges, ignore_merges=name == "llama-bpe"))
    byte_level = lambda regex: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    split = lambda regex: pre_tokenizers.Split(Regex(regex), "isolated")
    tok.pre_tokenizer = {
        "gpt2": lambda: byte_level(True),
        "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(True)]),
        "llama-bpe": lambda: pre_tokenizers.Sequence([split(LLAMA3), byte_level(False)]),
        "qwen2": lambda: pre_tokenizers.Sequence([split(QWEN2), byte_level(False)]),
    }[name]()
    if name == "qwen2":
        tok.normalizer = normalizers.NFC()
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return tok


def random_characters(rng, count):
    """Assigned characters of one block and its neighbours, so that scripts stay together."""
    out = []
    while len(out) < count:
        base = rng.choice([rng.randrange(0x80, 0x3000), rng.randrange(0x3000, 0xFFFF), rng.randrange(0x10000, 0x1FAFF),
                           rng.randrange(0x20000, 0x2A6DF)])
        for _ in range(rng.randrange(1, 6)):
            c = chr(base + rng.randrange(48))
            if unicodedata.category(c) not in ("Cn", "Cs"):
                out.append(c)
    return "".join(out[:count])


def number(rng):
    return rng.choice([str(rng.randrange(10 ** rng.randrange(1, 14))), "%.5f" % rng.random(), "1,234,567.89", "007", "3rd", "x86_64",
                       "٣٤٥", "１２３４", "Ⅻ½", "2024-02-29T23:59:60Z", "+1 (555) 010-9999", "50%", "1e9", "0b1010"])


def piece(rng, control):
    kind = rng.randrange(11)
    if kind == 0:
        words = rng.choice(SENTENCES).split()
        start = rng.randrange(len(words))
        return " ".join(words[start:start + rng.randrange(1, 6)])
    if kind == 1:
        return rng.choice(EMOJI)
    if kind == 2:
        return "".join(rng.choice(SPACES) for _ in range(rng.randrange(1, 5)))
    if kind == 3:
        return rng.choice(CONTRACTIONS)
    if kind == 4:
        return rng.choice(MARKS)
    if kind == 5:
        return number(rng)
    if kind == 6:
        return random_characters(rng, rng.randrange(1, 7))
    if kind == 7:
        code = rng.choice(CODE).replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t")
        start = rng.randrange(len(code))
        return code[start:start + rng.randrange(4, 30)]
    if kind == 8:
        return "".join(rng.choice("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~\x00\x01\x02\x07\x1b\x7f") for _ in range(rng.randrange(1, 6)))
    if kind == 9:
        return rng.choice(control + ["<|im_start", "|>", "<|", "<|im_end|", "<<|im_end|>>"])
    return rng.choice([" ", ""]).join(rng.choice(WORDS) for _ in range(rng.randrange(1, 5)))


def long_run(rng):
    unit = rng.choice([" ", "\n", "a", "ab", "=", "-", "é", "字", "9", "\t", "\r\n", "! ", "🙂", "\u0301", "\u0323\u0301", " \n", "'s", "the"])
    return rng.choice(["", "x", " "]) + unit * rng.choice([63, 64, 65, 97, 300]) + rng.choice(["", "x", " y", "\n", "7"])


def strings(control):
    rng = random.Random(SEED)
    out = ["", " ", "a", "\n", "'", "0"] + SENTENCES + [c.replace("\\n", "\n").replace("\\t", "\t") for c in CODE]
    out += EMOJI + SPACES + CONTRACTIONS + MARKS + control
    out += ["<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "1234567 and 3.14159"]
    out += [long_run(rng) for _ in range(60)]
    seen = set()
    out = [s for s in out if not (s in seen or seen.add(s))]
    while len(out) < NUM_STRINGS:
        text = rng.choice(["", "", " "]).join(piece(rng, control) for _ in range(rng.randrange(1, 7)))
        if text not in seen:
            seen.add(text)
            out.append(text)
    return out


def write_encodings():
    tokens, control, merges = load()
    names = ["smollm", "gpt2", "llama-bpe", "qwen2"]
    toks = [make(n, tokens, control, merges) for n in names]
    with open(os.path.join(OUT, "encodings.jsonl"), "w", encoding="utf-8", newline="\n") as f:
        for text in strings(control):
            for parse_special in ([1, 0] if any(c in text for c in control) else [1]):
                row = [text, parse_special]
                lists = []
                for tok in toks:
                    tok.encode_special_tokens = not parse_special
                    ids = tok.encode(text, add_special_tokens=False).ids
                    row.append(lists.index(ids) if ids in lists else ids)
                    lists.append(ids)
                f.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")


def write_utf8_replace():
    rng = random.Random(SEED + 1)
    lead = [0x00, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xED, 0xEE, 0xEF, 0xF0, 0xF1,
            0xF4, 0xF5, 0xF8, 0xFF]
    cases = [bytes([a]) for a in range(256)] + [bytes([a, b]) for a in lead for b in lead]
    for _ in range(600):
        good = "".join(rng.choice("aé字🙂\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff") for _ in range(rng.randrange(1, 5))).encode()
        data = bytearray(good)
        for _ in range(rng.randrange(4)):
            at = rng.randrange(len(data) + 1)
            data[at:at + rng.randrange(2)] = bytes([rng.choice(lead)]) * rng.randrange(2)
        cases.append(bytes(data))
    with open(os.path.join(OUT, "utf8_replace.jsonl"), "w", encoding="utf-8", newline="\n") as f:
        for case in cases:
            f.write(json.dumps([case.hex(), case.decode("utf-8", "replace")], separators=(",", ":")) + "\n")


if __name__ == "__main__":
    os.makedirs(OUT, exist_ok=True)
    write_encodings()
    write_utf8_replace()
    print({name: os.path.getsize(os.path.join(OUT, name)) for name in sorted(os.listdir(OUT))})
