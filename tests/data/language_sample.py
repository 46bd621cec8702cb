"""A few sentences in many languages, by ISO 639-1 code: the kind of words that people write to a support desk."""

SENTENCES: dict[str, tuple[str, ...]] = {
    "en": (
        "My card was charged twice for the same order yesterday, and nobody has answered my e-mail so far.",
        "Each shelf holds twelve jars, so four shelves hold forty-eight jars before the kitchen is full.",
        "Please tell me how long a transfer to another country usually takes.",
    ),
    "de": (
        "Meine Karte wurde gestern zweimal für dieselbe Bestellung belastet, und niemand hat bisher geantwortet.",
        "Auf jedem Regal stehen zwölf Gläser, also stehen auf vier Regalen achtundvierzig Gläser.",
        "Bitte sagen Sie mir, wie lange eine Überweisung in ein anderes Land normalerweise dauert.",
    ),
    "fr": (
        "Ma carte a été débitée deux fois hier pour la même commande, et personne ne m'a encore répondu.",
        "Chaque étagère porte douze bocaux, donc quatre étagères en portent quarante-huit.",
        "Dites-moi s'il vous plaît combien de temps dure un virement vers un autre pays.",
    ),
    "es": (
        "Ayer me cobraron dos veces el mismo pedido en la tarjeta y nadie ha contestado a mi correo.",
        "En cada estante caben doce frascos, así que en cuatro estantes caben cuarenta y ocho.",
        "Por favor, dígame cuánto tarda normalmente una transferencia a otro país.",
    ),
    "it": (
        "Ieri la mia carta è stata addebitata due volte per lo stesso ordine e nessuno mi ha ancora risposto.",
        "Su ogni scaffale ci sono dodici barattoli, quindi su quattro scaffali ce ne sono quarantotto.",
        "Mi dica per favore quanto tempo richiede di solito un bonifico verso un altro paese.",
    ),
    "pt": (
        "Ontem o meu cartão foi cobrado duas vezes pela mesma encomenda e ninguém respondeu ainda.",
        "Em cada prateleira cabem doze frascos, portanto em quatro prateleiras cabem quarenta e oito.",
        "Diga-me, por favor, quanto tempo demora normalmente uma transferência para outro país.",
    ),
    "nl": (
        "Mijn kaart is gisteren twee keer belast voor dezelfde bestelling en niemand heeft nog geantwoord.",
        "Op elke plank staan twaalf potten, dus op vier planken staan achtenveertig potten.",
        "Kunt u mij vertellen hoe lang een overboeking naar een ander land gewoonlijk duurt?",
    ),
    "sv": (
        "Mitt kort debiterades två gånger för samma beställning i går och ingen har svarat ännu.",
        "På varje hylla står tolv burkar, så på fyra hyllor står fyrtioåtta burkar.",
        "Kan ni berätta hur lång tid en överföring till ett annat land brukar ta?",
    ),
    "pl": (
        "Wczoraj moja karta została obciążona dwa razy za to samo zamówienie i nikt jeszcze nie odpowiedział.",
        "Na każdej półce stoi dwanaście słoików, więc na czterech półkach stoi czterdzieści osiem.",
        "Proszę mi powiedzieć, jak długo zwykle trwa przelew do innego kraju.",
    ),
    "tr": (
        "Dün aynı sipariş için kartımdan iki kez para çekildi ve henüz kimse cevap vermedi.",
        "Her rafta on iki kavanoz var, bu yüzden dört rafta kırk sekiz kavanoz olur.",
        "Başka bir ülkeye para göndermek genellikle ne kadar sürüyor, söyler misiniz?",
    ),
    "fi": (
        "Korttiani veloitettiin eilen kahdesti samasta tilauksesta, eikä kukaan ole vielä vastannut.",
        "Jokaisella hyllyllä on kaksitoista purkkia, joten neljällä hyllyllä on neljäkymmentäkahdeksan.",
        "Kertoisitteko, kuinka kauan tilisiirto toiseen maahan yleensä kestää?",
    ),
    "vi": (
        "Hôm qua thẻ của tôi bị trừ tiền hai lần cho cùng một đơn hàng và chưa có ai trả lời.",
        "Mỗi kệ có mười hai cái lọ, vì vậy bốn kệ có bốn mươi tám cái lọ.",
        "Xin cho tôi biết chuyển tiền sang nước khác thường mất bao lâu.",
    ),
    "id": (
        "Kemarin kartu saya ditagih dua kali untuk pesanan yang sama dan belum ada yang menjawab.",
        "Setiap rak berisi dua belas stoples, jadi empat rak berisi empat puluh delapan stoples.",
        "Tolong beri tahu saya berapa lama biasanya pengiriman uang ke negara lain.",
    ),
    "ru": (
        "Вчера с моей карты дважды списали деньги за один и тот же заказ, и никто до сих пор не ответил.",
        "На каждой полке стоит двенадцать банок, значит, на четырёх полках стоит сорок восемь.",
        "Скажите, пожалуйста, сколько времени обычно занимает перевод в другую страну.",
    ),
    "el": (
        "Χθες η κάρτα μου χρεώθηκε δύο φορές για την ίδια παραγγελία και κανείς δεν έχει απαντήσει.",
        "Σε κάθε ράφι υπάρχουν δώδεκα βάζα, άρα σε τέσσερα ράφια υπάρχουν σαράντα οκτώ.",
        "Πείτε μου παρακαλώ πόσο διαρκεί συνήθως μια μεταφορά χρημάτων σε άλλη χώρα.",
    ),
    "ar": (
        "تم خصم المبلغ من بطاقتي مرتين أمس للطلب نفسه ولم يرد علي أحد حتى الآن.",
        "يحمل كل رف اثني عشر مرطبانا، لذلك تحمل أربعة رفوف ثمانية وأربعين مرطبانا.",
        "من فضلك أخبرني كم يستغرق التحويل إلى بلد آخر عادة.",
    ),
    "hi": (
        "कल एक ही ऑर्डर के लिए मेरे कार्ड से दो बार पैसे काटे गए और अब तक किसी ने जवाब नहीं दिया है।",
        "हर शेल्फ पर बारह जार हैं, इसलिए चार शेल्फ पर अड़तालीस जार हैं।",
        "कृपया मुझे बताइए कि दूसरे देश में पैसे भेजने में आम तौर पर कितना समय लगता है।",
    ),
    "zh": (
        "昨天我的卡因为同一笔订单被扣了两次款，到现在还没有人回复我的邮件。",
        "每个架子上有十二个罐子，所以四个架子上一共有四十八个罐子。",
        "请告诉我，转账到另一个国家通常需要多长时间。",
    ),
    "ja": (
        "昨日、同じ注文でカードから二回引き落とされましたが、まだ誰からも返事がありません。",
        "棚ごとに十二個の瓶があるので、四つの棚には四十八個の瓶があります。",
        "ほかの国への送金には普通どのくらい時間がかかるのか教えてください。",
    ),
    "ko": (
        "어제 같은 주문으로 카드에서 두 번 결제되었는데 아직 아무도 답장을 하지 않았습니다.",
        "선반마다 병이 열두 개 있으므로 선반 네 개에는 병이 마흔여덟 개 있습니다.",
        "다른 나라로 송금하는 데 보통 얼마나 걸리는지 알려 주세요.",
    ),
}
