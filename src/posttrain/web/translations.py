"""The texts of the pages in English and Chinese, and the choice between them."""

from collections.abc import Mapping

from starlette.requests import Request

LANGUAGES = {"en": "English", "zh": "中文"}
LANGUAGE_COOKIE = "posttrain-language"

MESSAGES: dict[str, dict[str, str]] = {
    "site.name": {"en": "posttrain", "zh": "posttrain"},
    "site.skip": {"en": "Skip to content", "zh": "跳到正文"},
    "site.language": {"en": "Language", "zh": "语言"},
    "site.navigation": {"en": "Pages", "zh": "页面"},
    "nav.home": {"en": "Start", "zh": "首页"},
    "nav.label": {"en": "Label", "zh": "标注"},
    "nav.review": {"en": "Review", "zh": "复核"},
    "nav.quality": {"en": "Quality", "zh": "质量"},
    "nav.people": {"en": "People", "zh": "人员"},
    "nav.dashboard": {"en": "Dashboard", "zh": "仪表盘"},
    "role.owner": {"en": "owner", "zh": "所有者"},
    "role.reviewer": {"en": "reviewer", "zh": "复核员"},
    "role.annotator": {"en": "annotator", "zh": "标注员"},
    "role.viewer": {"en": "viewer", "zh": "访客"},
    "home.title": {"en": "Start", "zh": "首页"},
    "home.welcome": {"en": "You are signed in as {name}, {role}.", "zh": "您已登录:{name}({role})。"},
    "home.waiting": {"en": "The loop waits for {what}.", "zh": "循环正在等待:{what}"},
    "home.idle": {"en": "The loop waits for nothing.", "zh": "循环没有在等待输入。"},
    "sign_in.title": {"en": "Sign in", "zh": "登录"},
    "sign_in.name": {"en": "Name", "zh": "用户名"},
    "sign_in.password": {"en": "Password", "zh": "密码"},
    "sign_in.button": {"en": "Sign in", "zh": "登录"},
    "sign_in.continue": {"en": "Continue as {name}", "zh": "以 {name} 的身份继续"},
    "sign_in.link_note": {
        "en": "This link signs you in once. Keep it to yourself.",
        "zh": "此链接只能使用一次,请勿转发。",
    },
    "sign_in.no_passwords": {
        "en": "No account has a password yet. Use the link that the terminal showed, or print another one: "
        "posttrain accounts link",
        "zh": "尚无账户设置密码。请使用终端中显示的链接,或运行 posttrain accounts link 生成新链接。",
    },
    "sign_in.out": {"en": "Sign out", "zh": "退出登录"},
    "invitation.title": {"en": "Join", "zh": "加入"},
    "invitation.text": {
        "en": "You are invited to this workspace as {role}. Choose a name and a password.",
        "zh": "您受邀以“{role}”的身份加入此工作区。请选择用户名和密码。",
    },
    "invitation.repeat": {"en": "Password again", "zh": "再次输入密码"},
    "invitation.hint": {
        "en": "At least 10 characters; a sentence is easy to remember.",
        "zh": "至少 10 个字符;一句话更容易记住。",
    },
    "invitation.button": {"en": "Create the account", "zh": "创建账户"},
    "error.title": {"en": "This did not work", "zh": "操作未成功"},
    "error.wrong": {"en": "The name or the password is wrong.", "zh": "用户名或密码错误。"},
    "error.limit": {
        "en": "Too many attempts. Try again in {minutes} min.",
        "zh": "尝试次数过多。请在 {minutes} 分钟后重试。",
    },
    "error.link": {
        "en": "This link was used already, has expired, or never was. Ask for a new one.",
        "zh": "此链接已使用、已过期或不存在。请索取新的链接。",
    },
    "error.repeat": {"en": "The two passwords differ.", "zh": "两次输入的密码不一致。"},
    "error.page": {"en": "There is no such page.", "zh": "页面不存在。"},
    "error.role": {"en": "Your role does not reach this page.", "zh": "您的角色无权访问此页面。"},
}
"""Each text by its id and language; parts in braces are filled in. Pages add theirs by `add_messages`."""


def add_messages(messages: Mapping[str, Mapping[str, str]]) -> None:
    """Adds the texts of a page.

    Raises:
        ValueError: a text lacks a language, or another page has its id.
    """
    for key, texts in messages.items():
        if key in MESSAGES and MESSAGES[key] != dict(texts):
            raise ValueError(f"two texts have the id {key}")
        if missing := LANGUAGES.keys() - texts.keys():
            raise ValueError(f"{key} lacks {', '.join(sorted(missing))}")
        MESSAGES[key] = dict(texts)


class Translator:
    """Returns texts in one language: ``translate("nav.label")``."""

    def __init__(self, language: str) -> None:
        self.language = language

    def __call__(self, key: str, **values: object) -> str:
        text = MESSAGES[key][self.language]
        return text.format(**values) if values else text

    def has(self, key: str) -> bool:
        """Returns whether there is a text of this id."""
        return key in MESSAGES


def choose_language(request: Request) -> str:
    """Returns the language of a request: the one that its person chose, else the first that the browser asks for."""
    chosen = request.cookies.get(LANGUAGE_COOKIE, "")
    if chosen in LANGUAGES:
        return chosen
    ranked = sorted(_accepted(request.headers.get("accept-language", "")[:500]), key=lambda item: -item[0])
    return next((language for _, language in ranked if language in LANGUAGES), "en")


def _accepted(header: str) -> list[tuple[float, str]]:
    """Parses ``zh-CN,zh;q=0.9,en;q=0.8`` to weights and languages."""
    accepted = []
    for part in header.split(","):
        name, _, weight = part.partition(";q=")
        try:
            accepted.append((float(weight or 1), name.strip().split("-")[0].lower()))
        except ValueError:
            continue
    return accepted
